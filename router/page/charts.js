// Small line charts in SVG over the samples of the live feed. Colours come from the style sheet, so they follow the theme.

import { byId, bytes, count, el, rate, seconds, setText } from "./dom.js";
import { niceStep } from "./timeline.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 112;
const TOP = 8;
const BOTTOM = 20;
const LEFT = 58;
const SHORTEST_SPAN_S = 60;

const percentile = (field, at) => (sample) => (sample[field] ? sample[field][at] : null);
const percentiles = (field) => ["p50", "p90", "p99"].map((name, at) => ({ name, style: name, of: percentile(field, at) }));

const CHARTS = [
  {
    title: "Output tokens",
    unit: "tokens/s",
    show: rate,
    series: [{ name: "all", style: "decode", of: (s) => s.tokens_per_s }],
  },
  { title: "Time to first token", unit: "", show: seconds, series: percentiles("ttft_s") },
  { title: "Inter-token latency", unit: "", show: seconds, series: percentiles("itl_s") },
  {
    title: "Requests",
    unit: "",
    show: count,
    series: [
      { name: "no token yet", style: "queued", of: (s) => s.num_queue_reqs },
      { name: "streaming", style: "decode", of: (s) => s.num_running_reqs },
      { name: "refused/s", style: "p99", of: (s) => s.rejected_per_s, show: rate, rare: true },
    ],
  },
  {
    title: "Queues of the nodes",
    unit: "",
    show: count,
    series: [
      { name: "prefill", style: "prefill", of: (s) => s.prefill.num_queue_reqs },
      { name: "transfer", style: "transfer", of: (s) => s.decode.num_transferring_reqs },
      { name: "decode", style: "decode", of: (s) => s.decode.num_queue_reqs },
    ],
  },
  {
    title: "KV transfer",
    unit: "",
    show: (value) => `${bytes(value)}/s`,
    series: [{ name: "received", style: "transfer", of: (s) => s.decode.kv_bytes_per_s }],
  },
];

export class Charts {
  constructor() {
    this.charts = CHARTS.map((chart) => new Chart(chart));
    byId("chart-list").append(...this.charts.map((chart) => chart.figure));
    this.samples = [];
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(byId("chart-list"));
  }

  update(samples, router) {
    this.samples = samples;
    const whose = router.worker === null ? "All clients" : `Clients of router ${router.worker}; nodes serve all routers`;
    setText(byId("charts-note"), `${whose}; percentiles over ${router.percentile_window_s} s`);
    for (const chart of this.charts) chart.sayWhyEmpty("Nothing yet: send a request.");
    this.draw();
  }

  // The last samples stay.
  lose(why) {
    for (const chart of this.charts) chart.sayWhyEmpty(why);
    setText(byId("charts-note"), this.samples.length ? "The router does not answer. These are its last samples." : "");
  }

  draw() {
    for (const chart of this.charts) chart.draw(this.samples);
  }
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.figure = el("figure", "chart");
    const caption = el("figcaption");
    caption.append(el("span", "chart-title", spec.unit ? `${spec.title}, ${spec.unit}` : spec.title));
    this.legend = el("span", "legend");
    this.entries = spec.series.map((series) => {
      const entry = el("span", "legend-entry");
      const value = el("span", "legend-value", "–");
      entry.append(el("span", `swatch ${series.style}`));
      if (spec.series.length > 1) entry.append(el("span", "legend-name", series.name));
      entry.append(value);
      this.legend.append(entry);
      return { entry, value };
    });
    caption.append(this.legend);
    this.svg = svg("svg", { role: "img", height: HEIGHT, class: "plot" });
    this.empty = el("p", "empty note", "Waiting for the router …");
    this.figure.append(caption, this.svg, this.empty);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.pointedX = null;
    this.samples = [];
  }

  sayWhyEmpty(why) {
    setText(this.empty, why);
  }

  point(x) {
    this.pointedX = x;
    this.draw(this.samples);
  }

  draw(samples) {
    this.samples = samples;
    const { spec } = this;
    const width = this.figure.clientWidth;
    if (!width || !samples.length) return;
    const lines = spec.series.map((series) => samples.map(series.of));
    const known = lines.flat().filter((value) => value !== null);
    const end = samples.at(-1).time;
    const span = Math.max(SHORTEST_SPAN_S, end - samples[0].time);
    const step = Math.max(niceStep(Math.max(...known, 0.001) / 2.5), spec.show === seconds ? 0 : 1);
    const top = Math.max(step * Math.ceil(Math.max(...known, 0) / step), step);
    const x = (time) => LEFT + ((time - end + span) / span) * (width - LEFT - 4);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);

    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("width", width);
    const parts = [];
    for (let value = 0; value <= top * 1.001; value += step) {
      parts.push(svg("line", { class: value ? "grid" : "base", x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
      parts.push(label(LEFT - 6, y(value) + 3.5, "end", value || spec.show === seconds ? tickText(spec, value) : "0"));
    }
    for (const [at, text] of timeTicks(span, width - LEFT)) {
      parts.push(label(x(end - at), HEIGHT - 5, at ? "middle" : "end", text));
    }
    lines.forEach((values, at) => {
      if (isQuiet(spec.series[at], values)) return;
      const d = path(samples, values, x, y);
      parts.push(svg("path", { class: `line ${spec.series[at].style}`, d }));
    });
    const pointed = this.pointedX === null ? null : nearest(samples, x, this.pointedX);
    if (pointed !== null) {
      const at = x(samples[pointed].time);
      parts.push(svg("line", { class: "crosshair", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
      parts.push(label(Math.min(Math.max(at, LEFT + 24), width - 30), TOP + 4, "middle", ago(end - samples[pointed].time)));
    }
    this.svg.replaceChildren(...parts);
    this.empty.hidden = known.length > 0;
    this.tell(lines, pointed ?? samples.length - 1);
  }

  tell(lines, at) {
    const { spec } = this;
    const shown = lines.map((values, i) => (values[at] === null ? "–" : (spec.series[i].show ?? spec.show)(values[at])));
    shown.forEach((text, i) => {
      setText(this.entries[i].value, text);
      this.entries[i].entry.hidden = isQuiet(spec.series[i], lines[i]);
    });
    const words = spec.series.map((series, i) => {
      const known = lines[i].filter((value) => value !== null);
      const highest = known.length ? `, highest ${(series.show ?? spec.show)(Math.max(...known))}` : "";
      return `${series.name} ${shown[i] === "–" ? "no data" : shown[i]}${highest}`;
    });
    const unit = spec.unit ? ` in ${spec.unit}` : "";
    this.svg.setAttribute("aria-label", `${spec.title}${unit}: ${words.join("; ")}.`);
  }
}

// The series of a rare event is left out until the event has happened.
const isQuiet = (series, values) => Boolean(series.rare) && values.every((value) => !value);

function tickText(spec, value) {
  if (spec.show !== seconds) return spec.show(value).replace(".0 ", " ");
  if (!value) return "0";
  return value < 1 ? `${+(1000 * value).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`;
}

function timeTicks(span, width) {
  const most = Math.max(1, width / 80);
  const step = [15, 30, 60, 120, 300].find((seconds) => span / seconds <= most) ?? 300;
  const ticks = [[0, "now"]];
  for (let at = step; at < span * 0.96; at += step) ticks.push([at, ago(at)]);
  return ticks;
}

function ago(s) {
  if (s < 1) return "now";
  return s < 60 || s % 60 >= 1 ? `−${Math.floor(s / 60) ? `${Math.floor(s / 60)} min ` : ""}${Math.round(s % 60)} s` : `−${s / 60} min`;
}

function nearest(samples, x, pointed) {
  let best = 0;
  samples.forEach((sample, at) => {
    if (Math.abs(x(sample.time) - pointed) < Math.abs(x(samples[best].time) - pointed)) best = at;
  });
  return best;
}

function path(samples, values, x, y) {
  let d = "";
  let down = false;
  values.forEach((value, at) => {
    if (value === null) {
      down = false;
      return;
    }
    const alone = !down && (values[at + 1] ?? null) === null;
    d += `${down ? "L" : "M"}${x(samples[at].time).toFixed(1)},${y(value).toFixed(1)}${alone ? "h1" : ""}`;
    down = true;
  });
  return d;
}

function label(x, y, anchor, text) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
