// Draws a request's stages in both fleets while they happen: one lane for each place, time from left to right.

import { byId, bytes, count, el, seconds, setText } from "./dom.js";

const LANES = ["router", "prefill", "decode"];
const PLACES = { router: "Router", prefill: "Prefill node", decode: "Decode node" };
const WORDS = {
  queued: "queued",
  prefilling: "prefill",
  transferring: "transfer",
  decoding: "decode",
  retracted: "retracted",
  streaming: "stream",
};

export class Timeline {
  constructor() {
    this.lanes = byId("lanes");
    this.tracks = new Map();
    for (const lane of LANES) {
      const track = el("div", "track");
      this.lanes.append(el("div", "lane-name", PLACES[lane]), track);
      this.tracks.set(lane, track);
    }
    this.axis = el("div", "axis");
    this.lanes.append(el("div"), this.axis);
    this.running = false;
    this.clear();
  }

  begin() {
    this.clear();
    this.sentAt = performance.now();
    this.running = true;
    const frame = () => {
      if (!this.running) return;
      this.draw();
      requestAnimationFrame(frame);
    };
    frame();
  }

  // The stamps that an event brought, in the clocks of their nodes, and how much KV has moved.
  tell(choice) {
    if (!choice.timeline) return;
    this.stamps = choice.timeline;
    this.moved = { pages: choice.kv_pages_transferred, bytes: choice.kv_bytes_transferred };
    const router = this.stamps.filter((stamp) => stamp.role === "router");
    this.start = router[0].time;
    this.latest = Math.max(...this.stamps.map((stamp) => stamp.time - this.start), 0);
    this.toldAt = performance.now();
    this.firstToldAt ??= (this.toldAt - this.sentAt) / 1000;
  }

  end() {
    this.running = false;
    this.draw();
    this.describe();
  }

  clear() {
    Object.assign(this, { stamps: [], moved: null, start: 0, latest: 0, toldAt: null, firstToldAt: null, sentAt: null });
    for (const track of this.tracks.values()) track.replaceChildren();
    this.axis.replaceChildren();
    byId("timeline-rows").replaceChildren();
    byId("timeline-details").hidden = true;
    setText(byId("timeline-words"), "Run a request to see it pass through both fleets.");
    this.lanes.setAttribute("aria-label", "No request has run yet.");
  }

  // Seconds since the router took the request; while it runs, the time since the last news is added.
  now() {
    if (this.toldAt === null) return (performance.now() - this.sentAt) / 1000;
    const finished = this.stamps.some((stamp) => stamp.role === "router" && stamp.stage === "finished");
    return this.latest + (this.running && !finished ? (performance.now() - this.toldAt) / 1000 : 0);
  }

  // [{lane, stage, from, to}] with times in seconds; the last stage of a lane goes on until now.
  segments() {
    const now = this.now();
    const segments = [];
    const since = (stamp) => Math.min(Math.max(stamp.time - this.start, 0), now);
    const decoding = this.stamps.find((stamp) => stamp.role === "decode" && stamp.stage === "decoding");
    for (const lane of ["prefill", "decode"]) {
      const own = this.stamps.filter((stamp) => stamp.role === lane);
      own.forEach((stamp, at) => {
        if (stamp.stage === "finished") return;
        let to = now;
        if (own[at + 1]) to = since(own[at + 1]);
        // A prefill node's last word is its first token: its part ends when the decode node has everything.
        else if (lane === "prefill" && decoding) to = Math.max(since(decoding), since(stamp));
        segments.push({ lane, stage: stamp.stage, from: since(stamp), to });
      });
    }
    const first = this.toldAt === null ? now : Math.min(this.firstToldAt, now);
    segments.unshift({ lane: "router", stage: "queued", from: 0, to: first });
    if (first < now) segments.splice(1, 0, { lane: "router", stage: "streaming", from: first, to: now });
    return segments;
  }

  draw() {
    const now = Math.max(this.now(), 0.001);
    const segments = this.segments();
    for (const [lane, track] of this.tracks) {
      const own = segments.filter((segment) => segment.lane === lane);
      while (track.children.length > own.length) track.lastChild.remove();
      own.forEach((segment, at) => {
        let bar = track.children[at];
        if (!bar) {
          bar = el("div");
          track.append(bar);
        }
        const share = (segment.to - segment.from) / now;
        bar.className = `segment ${segment.stage}`;
        bar.style.left = `${(100 * segment.from) / now}%`;
        bar.style.width = `${100 * share}%`;
        bar.title = `${WORDS[segment.stage] ?? segment.stage}: ${seconds(segment.to - segment.from)}`;
        const room = share * track.clientWidth;
        setText(bar, room > 56 ? WORDS[segment.stage] ?? segment.stage : "");
      });
    }
    this.drawAxis(now);
  }

  drawAxis(now) {
    const step = niceStep(now / 4);
    const ticks = Math.floor(now / step) + 1;
    while (this.axis.children.length > ticks) this.axis.lastChild.remove();
    for (let at = 0; at < ticks; at += 1) {
      const tick = this.axis.children[at] ?? this.axis.appendChild(el("span", "tick"));
      const place = (at * step) / now;
      tick.style.left = `${100 * place}%`;
      tick.classList.toggle("last", place > 0.9);
      setText(tick, at ? axisTime(at * step, now) : "0");
    }
  }

  describe() {
    const segments = this.segments().filter((segment) => segment.lane !== "router");
    const parts = segments.map((s) => `${WORDS[s.stage] ?? s.stage} ${seconds(s.to - s.from)} (${s.lane})`);
    if (this.moved?.pages) parts.push(`${count(this.moved.pages)} KV pages moved, ${bytes(this.moved.bytes)}`);
    const words = parts.length ? `${parts.join(" · ")}.` : "No stage is known of this request.";
    setText(byId("timeline-words"), words);
    this.lanes.setAttribute("aria-label", `Timeline of the request: ${words}`);
    byId("timeline-rows").replaceChildren(...this.segments().map(row));
    byId("timeline-details").hidden = false;
  }
}

function row(segment) {
  const tr = el("tr");
  tr.append(
    el("td", "", PLACES[segment.lane]),
    el("td", "", WORDS[segment.stage] ?? segment.stage),
    el("td", "number", seconds(segment.from)),
    el("td", "number", seconds(segment.to - segment.from)),
  );
  return tr;
}

export function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function axisTime(value, longest) {
  return longest < 1 ? `${Math.round(1000 * value * 10) / 10} ms` : `${Math.round(value * 100) / 100} s`;
}
