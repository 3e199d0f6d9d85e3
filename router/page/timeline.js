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
  failed_over: "failover",
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
    setText(byId("timeline-words"), "The nodes report their stages with the first token and with the last.");
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
    const { slow_because: slow, stages } = choice.first_token ?? {};
    this.slowStage = slow && stages.find(({ stage }) => stage === slow);
    this.moved = { pages: choice.kv_pages_transferred, bytes: choice.kv_bytes_transferred };
    const router = this.stamps.filter((stamp) => stamp.role === "router");
    this.start = router[0].time;
    this.latest = Math.max(...this.stamps.map((stamp) => stamp.time - this.start), 0);
    this.finished = router.some((stamp) => stamp.stage === "finished");
    this.firstToldAt ??= (performance.now() - this.sentAt) / 1000;
  }

  // `whole`: the request has ended, so a node that has reported no stage had no part in it.
  end(whole) {
    this.running = false;
    if (!this.stamps.length) {
      this.clear();
      setText(byId("timeline-words"), "No node has reported a stage of this request.");
      return;
    }
    this.whole = whole;
    this.endedAt = performance.now();
    this.draw();
    this.describe();
  }

  clear() {
    Object.assign(this, { stamps: [], slowStage: null, moved: null, whole: false, start: 0, latest: 0, finished: false, firstToldAt: null, sentAt: null, endedAt: null });
    for (const track of this.tracks.values()) track.replaceChildren();
    this.axis.replaceChildren();
    byId("timeline-rows").replaceChildren();
    byId("timeline-details").hidden = true;
    setText(byId("timeline-words"), "Run a request to see it pass through both fleets.");
    this.lanes.setAttribute("aria-label", "No request has run yet.");
  }

  // Seconds since the router took the request: by this clock while it runs, by the router's once it has finished.
  now() {
    if (this.finished) return this.latest;
    return Math.max(this.latest, ((this.endedAt ?? performance.now()) - this.sentAt) / 1000);
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
        // A prefill node's last report comes with its first token. Its part ends when the decode node has all pages.
        else if (lane === "prefill" && decoding) to = Math.max(since(decoding), since(stamp));
        segments.push({ lane, stage: stamp.stage, from: since(stamp), to });
      });
    }
    const first = Math.min(this.promptComputed() ?? this.firstToldAt ?? now, now);
    segments.unshift({ lane: "router", stage: "queued", from: 0, to: first });
    if (first < now) segments.splice(1, 0, { lane: "router", stage: "streaming", from: first, to: now });
    return segments;
  }

  // When a node had computed the prompt, and so the first token; undefined until a node has reported it.
  promptComputed() {
    for (const lane of ["prefill", "decode"]) {
      const own = this.stamps.filter((stamp) => stamp.role === lane);
      const at = own.findIndex((stamp) => stamp.stage === "prefilling");
      if (at >= 0 && own[at + 1]) return Math.max(own[at + 1].time - this.start, 0);
    }
    return undefined;
  }

  whyEmpty(lane) {
    const reached = (role, stage) => this.stamps.some((stamp) => stamp.role === role && stamp.stage === stage);
    if (lane === "prefill" && reached("decode", "prefilling")) return "no part in this request: the decode node computed the prompt";
    if (lane === "decode" && this.whole && reached("prefill", "prefilling")) return "no part in this request: one token was enough";
    return "no stage was reported";
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
    const reported = this.segments().filter((segment) => segment.lane !== "router");
    const parts = reported.map((s) => [s.stage, `${s.lane} node: ${WORDS[s.stage] ?? s.stage} ${seconds(s.to - s.from)}`]);
    if (this.moved?.pages) parts.push(["", `${count(this.moved.pages)} KV pages moved, ${bytes(this.moved.bytes)}`]);
    if (!parts.length) parts.push(["", "No node has reported a stage of this request."]);
    if (this.slowStage) {
      const { stage, node, seconds: took } = this.slowStage;
      parts.push(["", `Slow because of ${stage}${node ? ` (${node})` : ""}: ${seconds(took)}`]);
    }
    byId("timeline-words").replaceChildren(...parts.map(([stage, words]) => item(stage, words)));
    this.lanes.setAttribute("aria-label", `Timeline of the request: ${parts.map(([, words]) => words).join("; ")}.`);
    for (const [lane, track] of this.tracks) {
      if (!track.children.length) track.append(el("span", "unused", this.whyEmpty(lane)));
    }
    byId("timeline-rows").replaceChildren(...this.segments().map(row));
    byId("timeline-details").hidden = false;
  }
}

function item(stage, words) {
  const entry = el("span", "item");
  if (stage) entry.append(el("span", `box ${stage}`));
  entry.append(words);
  return entry;
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
