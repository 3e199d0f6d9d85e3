// The playground: one request at a time, streamed from /v1/completions or /v1/chat/completions.

import { byId, count, el, rate, seconds, setText } from "./dom.js";
import { Failure, events } from "./http.js";
import { Reply } from "./reply.js";
import { Timeline } from "./timeline.js";

const FINISHES = {
  stop: "Done: the model or a stop string ended it.",
  length: "Done: max tokens reached.",
  abort: "Ended: the request was aborted.",
  tool_calls: "Done: the model calls a tool. Write its answer into the card, and run.",
};

export class Playground {
  // `onRefused` is called when the API key is missing or wrong.
  constructor(onRefused) {
    this.onRefused = onRefused;
    this.timeline = new Timeline();
    this.form = byId("ask");
    this.prompt = byId("prompt");
    this.output = byId("output");
    this.kind = "completion";
    this.drafts = { completion: "", chat: "" };
    this.turns = [];
    this.reply = null;
    this.abort = null;
    this.refused = false;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    byId("stop-run").addEventListener("click", () => this.abort?.abort());
    byId("new-chat").addEventListener("click", () => this.newConversation());
    document.addEventListener("keydown", (event) => this.key(event));
    this.tabs = { completion: byId("tab-completion"), chat: byId("tab-chat") };
    for (const [kind, tab] of Object.entries(this.tabs)) {
      tab.addEventListener("click", () => this.choose(kind));
      tab.addEventListener("keydown", (event) => {
        if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
        event.preventDefault();
        const other = kind === "chat" ? "completion" : "chat";
        if (this.choose(other)) this.tabs[other].focus();
      });
    }
    this.allowChat(false, "Chat is off until the router says whether the model has a chat template.");
  }

  allowChat(allowed, why) {
    this.tabs.chat.setAttribute("aria-disabled", String(!allowed));
    byId("chat-note").hidden = allowed || !why;
    setText(byId("chat-note"), why);
    if (!allowed && this.kind === "chat") this.choose("completion");
  }

  // There is a new API key, so the refusal of the last one is cleared.
  forgetRefusal() {
    if (!this.refused) return;
    this.refused = false;
    byId("run-error").hidden = true;
    setText(byId("run-status"), "");
  }

  choose(kind) {
    if (kind === this.kind) return false;
    if (this.abort || (kind === "chat" && this.tabs.chat.getAttribute("aria-disabled") === "true")) return false;
    this.drafts[this.kind] = this.prompt.value;
    this.kind = kind;
    this.prompt.value = this.drafts[kind];
    const chat = kind === "chat";
    for (const [name, tab] of Object.entries(this.tabs)) {
      tab.setAttribute("aria-selected", String(name === kind));
      tab.tabIndex = name === kind ? 0 : -1;
    }
    this.form.setAttribute("aria-labelledby", `tab-${kind}`);
    for (const element of document.querySelectorAll(".chat-only")) element.hidden = !chat;
    byId("turns").hidden = !chat || !this.turns.length;
    byId("output-block").hidden = chat;
    setText(byId("prompt-label"), chat ? "Message" : "Prompt");
    this.prompt.placeholder = chat ? "Enter sends, Shift+Enter starts a line" : "Text to complete";
    this.prompt.rows = chat ? 2 : 6;
    return true;
  }

  key(event) {
    if (event.key === "Escape" && this.abort) {
      this.abort.abort();
      return;
    }
    if (event.key !== "Enter" || event.isComposing || !this.form.contains(event.target)) return;
    const sends = event.ctrlKey || event.metaKey || (this.kind === "chat" && event.target === this.prompt && !event.shiftKey);
    if (sends) {
      event.preventDefault();
      this.run();
    }
  }

  newConversation() {
    this.turns = [];
    this.reply = null;
    byId("turns").replaceChildren();
    byId("turns").hidden = true;
    setText(byId("run-status"), "A new conversation.");
    this.prompt.focus();
  }

  // What to send where, and what takes the answer. Null when there is nothing to send.
  request() {
    const stop = byId("stop").value.split("\n").filter((line) => line);
    const body = {
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      top_p: byId("top-p").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      return_timeline: true,
    };
    if (byId("seed").value) body.seed = byId("seed").valueAsNumber;
    if (stop.length) body.stop = stop;
    if (this.kind === "completion") {
      if (!this.prompt.value) return null;
      this.output.replaceChildren();
      const tell = (choice) => this.output.append(choice.text);
      return { path: "/v1/completions", body: { ...body, prompt: this.prompt.value }, output: this.output, tell };
    }
    const calls = this.reply?.calls.length ? this.reply : null;
    const asked = calls ? calls.answers() : this.prompt.value.trim() && [{ role: "user", content: this.prompt.value }];
    if (!asked) return null;
    this.asked = { messages: asked, calls, shown: calls ? null : this.showTurn("user", this.prompt.value) };
    calls?.close(true);
    if (!calls) this.prompt.value = "";
    this.turns.push(...asked);
    const system = byId("system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...this.turns] : [...this.turns];
    const tools = byId("tools").value.trim();
    if (tools) body.tools = JSON.parse(tools);
    const output = this.showTurn("assistant", "");
    const reply = (this.reply = new Reply(output));
    const tell = (choice) => reply.tell(choice.delta);
    return { path: "/v1/chat/completions", body: { ...body, messages }, output, tell };
  }

  // Tools are a JSON list; the browser shows what is wrong with them.
  checkTools() {
    const field = byId("tools");
    let wrong = "";
    try {
      if (field.value.trim() && !Array.isArray(JSON.parse(field.value))) wrong = "A JSON list of tools, as in OpenAI's API.";
    } catch (error) {
      wrong = `No JSON: ${error.message}`;
    }
    field.setCustomValidity(this.kind === "chat" ? wrong : "");
  }

  async run() {
    this.checkTools();
    if (this.abort || !this.form.reportValidity()) return;
    const request = this.request();
    if (!request) {
      const open = this.kind === "chat" && this.reply?.calls.find(({ answer }) => !answer.value);
      setText(byId("run-status"), open ? "Answer the call first." : "Write a prompt first.");
      (open ? open.answer : this.prompt).focus();
      return;
    }
    this.abort = new AbortController();
    this.begin();
    let words;
    try {
      words = await this.stream(request);
    } catch (error) {
      words = error.name === "AbortError" ? "Stopped." : "";
      if (words === "") this.fail(error);
    }
    if (this.kind === "chat") this.endTurn(request.output);
    this.end(words);
  }

  async stream({ path, body, output, tell }) {
    const scroller = output.closest(".turns") ?? output;
    let waiting = [];
    const flush = () => {
      if (!waiting.length) return;
      const following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 24;
      waiting.forEach(tell);
      output.normalize();
      waiting = [];
      if (following) scroller.scrollTop = scroller.scrollHeight;
    };
    try {
      for await (const event of events(path, { body, signal: this.abort.signal })) {
        if (event.usage) this.count(event.usage);
        const choice = event.choices[0];
        if (!choice) continue;
        this.timeline.tell(choice);
        if (!waiting.length) requestAnimationFrame(flush);
        waiting.push(choice);
        if (choice.finish_reason) this.finish = choice.finish_reason;
      }
    } finally {
      flush();
    }
    return FINISHES[this.finish] ?? "Done.";
  }

  begin() {
    this.startedAt = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.finish = "";
    this.refused = false;
    this.enable(false);
    byId("run-error").hidden = true;
    this.output.setAttribute("aria-busy", "true");
    setText(byId("run-status"), "Running …");
    this.timeline.begin();
    this.showFigures();
    this.ticking = setInterval(() => this.showFigures(), 100);
  }

  enable(idle) {
    byId("run").disabled = byId("new-chat").disabled = !idle;
    byId("stop-run").disabled = idle;
  }

  end(words) {
    clearInterval(this.ticking);
    this.abort = null;
    this.endedAt = performance.now();
    this.enable(true);
    this.output.removeAttribute("aria-busy");
    this.timeline.end(this.finish !== "" && this.finish !== "abort");
    this.showFigures();
    const number = this.usage?.completion_tokens;
    const tokens = this.usage ? ` ${count(number)} ${number === 1 ? "token" : "tokens"} in ${seconds(this.elapsed())}.` : "";
    setText(byId("run-status"), words ? words + tokens : "Failed.");
  }

  fail(error) {
    const alert = byId("run-error");
    alert.hidden = false;
    setText(alert, error instanceof Failure ? error.message : "Something on this page went wrong.");
    alert.scrollIntoView({ block: "nearest" });
    this.refused = error.status === 401;
    if (this.refused) this.onRefused();
    if (!(error instanceof Failure)) console.error(error);
  }

  count(usage) {
    if (this.firstAt === null && usage.completion_tokens) this.firstAt = performance.now();
    this.lastAt = performance.now();
    this.usage = usage;
  }

  elapsed() {
    return ((this.abort ? performance.now() : this.endedAt) - this.startedAt) / 1000;
  }

  showFigures() {
    const tokens = this.usage?.completion_tokens ?? 0;
    const prompt = this.usage?.prompt_tokens;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const decoding = this.firstAt === null ? 0 : (this.lastAt - this.firstAt) / 1000;
    setText(byId("figure-tokens"), count(tokens));
    setText(byId("figure-rate"), tokens > 1 && decoding > 0 ? rate((tokens - 1) / decoding) : "–");
    setText(byId("figure-ttft"), this.firstAt === null ? "–" : seconds((this.firstAt - this.startedAt) / 1000));
    setText(byId("figure-total"), seconds(this.elapsed()));
    setText(byId("figure-prompt"), prompt === undefined ? "–" : `${count(prompt)} / ${count(cached)}`);
  }

  showTurn(role, text) {
    const turn = el("div", `turn ${role}`);
    const content = role === "user" ? el("div", "turn-text", text) : el("div", "turn-body");
    turn.append(el("div", "turn-role", role === "user" ? "You" : "Model"), content);
    byId("turns").append(turn);
    byId("turns").hidden = false;
    turn.scrollIntoView({ block: "nearest" });
    return content;
  }

  // A turn without an answer is removed, so that the next request does not have it.
  endTurn(output) {
    const answer = this.reply.message();
    if (answer) {
      this.turns.push(answer);
      this.reply.calls[0]?.answer.focus();
      return;
    }
    const { messages, calls, shown } = this.asked;
    this.turns.length -= messages.length;
    this.reply = calls;
    calls?.close(false);
    shown?.parentNode.remove();
    output.parentNode.remove();
    byId("turns").hidden = !this.turns.length;
    if (shown && !this.prompt.value) this.prompt.value = messages[0].content;
  }
}
