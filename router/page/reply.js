// An answer of the chat as it comes: reasoning, which is folded, text, and calls as cards that take an answer by hand.

import { el } from "./dom.js";

export class Reply {
  constructor(body) {
    this.body = body;
    this.text = body.appendChild(el("div", "turn-text"));
    this.reasoning = null;
    this.calls = [];
  }

  tell(delta) {
    if (delta.reasoning_content) this.thought().append(delta.reasoning_content);
    if (delta.content) this.text.append(delta.content);
    for (const piece of delta.tool_calls ?? []) this.tellCall(piece);
  }

  thought() {
    if (!this.reasoning) {
      const details = el("details", "reasoning");
      this.reasoning = el("div", "turn-text");
      details.append(el("summary", "", "Reasoning"), this.reasoning);
      this.body.prepend(details);
    }
    return this.reasoning;
  }

  tellCall({ index, id, function: { name, arguments: more } }) {
    if (!this.calls[index]) {
      const card = el("div", "call");
      const shown = el("pre", "arguments");
      const answer = el("textarea");
      answer.rows = 1;
      answer.placeholder = "What the tool answers";
      answer.setAttribute("aria-label", `Answer of ${name}`);
      card.append(el("div", "call-name", name), shown, answer);
      this.body.append(card);
      this.calls[index] = { id, name, shown, answer };
    }
    this.calls[index].shown.append(more ?? "");
  }

  // The message as the next request has it; null if nothing has come.
  message() {
    const content = this.text.textContent;
    if (!content && !this.calls.length) return null;
    const message = { role: "assistant", content: content || null };
    if (this.reasoning) message.reasoning_content = this.reasoning.textContent;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, shown }) => ({
        id,
        type: "function",
        function: { name, arguments: shown.textContent },
      }));
    }
    return message;
  }

  // The answers that were written into the cards; null while one is missing.
  answers() {
    if (!this.calls.every(({ answer }) => answer.value)) return null;
    return this.calls.map(({ id, answer }) => ({ role: "tool", tool_call_id: id, content: answer.value }));
  }

  // Answers that were sent cannot be changed any more.
  close(closed) {
    for (const { answer } of this.calls) answer.readOnly = closed;
  }
}
