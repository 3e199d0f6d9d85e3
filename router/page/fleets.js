// The nodes of both fleets now, and announcements of nodes that come and go.

import { byId, bytes, count, el, rate, setText } from "./dom.js";

const FLEETS = [
  { role: "prefill", title: "Prefill fleet", none: "No prefill nodes: decode nodes prefill by themselves." },
  { role: "decode", title: "Decode fleet", none: "No decode nodes: nothing can be served." },
];
const QUEUES = {
  prefill: [
    ["bootstrap", "num_bootstrapping_reqs"],
    ["waiting", "num_queue_reqs"],
    ["prefill", "num_running_reqs"],
    ["transfer", "num_transferring_reqs"],
  ],
  decode: [
    ["prealloc", "num_bootstrapping_reqs"],
    ["transfer", "num_transferring_reqs"],
    ["waiting", "num_queue_reqs"],
    ["running", "num_running_reqs"],
  ],
};

export class Fleets {
  constructor() {
    this.states = null;
    this.fleets = FLEETS.map((spec) => {
      const section = el("section", `fleet ${spec.role}`);
      const title = el("h3", "", spec.title);
      const tally = el("span", "tally");
      title.append(" ", tally);
      const list = el("ul", "nodes");
      const note = el("p", "note", "Waiting for the router …");
      section.append(title, note, list);
      byId("fleet-list").append(section);
      return { ...spec, list, note, tally, cards: new Map() };
    });
  }

  update(nodes) {
    for (const fleet of this.fleets) {
      const own = nodes.filter((node) => node.role === fleet.role);
      const live = own.filter((node) => node.state === "live").length;
      setText(fleet.tally, own.length ? `${live} of ${own.length} live` : "");
      setText(fleet.note, fleet.none);
      fleet.note.hidden = own.length > 0;
      const seen = new Set();
      for (const node of own) {
        const name = node.node_id || node.address;
        seen.add(name);
        let card = fleet.cards.get(name);
        if (!card) {
          card = new Card(name, fleet.role);
          fleet.cards.set(name, card);
          fleet.list.append(card.item);
        }
        card.update(node);
      }
      for (const [name, card] of fleet.cards) {
        if (!seen.has(name)) {
          card.item.remove();
          fleet.cards.delete(name);
        }
      }
    }
    this.tellNews(nodes);
  }

  // Until the router answers again.
  lose(why) {
    for (const fleet of this.fleets) {
      setText(fleet.tally, "");
      if (!fleet.cards.size) setText(fleet.note, why);
      for (const card of fleet.cards.values()) card.lose();
    }
  }

  tellNews(nodes) {
    const states = new Map(nodes.map((node) => [node.node_id || node.address, node.state]));
    if (this.states) {
      const news = [];
      for (const node of nodes) {
        const name = node.node_id || node.address;
        if (this.states.get(name) !== node.state) news.push(`${name} is ${node.state}${node.reason ? `: ${node.reason}` : ""}`);
      }
      for (const name of this.states.keys()) if (!states.has(name)) news.push(`${name} is forgotten`);
      if (news.length) setText(byId("fleet-news"), news.join("; "));
    }
    this.states = states;
  }
}

class Card {
  constructor(name, role) {
    this.item = el("li", "node");
    const head = el("div", "node-head");
    this.state = el("span", "state");
    this.dot = el("span", "dot");
    this.dot.setAttribute("aria-hidden", "true");
    this.word = el("span");
    this.state.append(this.dot, this.word);
    head.append(el("strong", "node-name", name), this.state);
    this.reason = el("p", "note reason");
    this.body = el("div", "node-body");
    this.queues = el("dl", "queues");
    this.cells = QUEUES[role].map(([title, field]) => {
      const cell = el("div");
      const value = el("dd");
      cell.append(el("dt", "", title), value);
      this.queues.append(cell);
      return [field, value];
    });
    this.bar = el("div", "pages");
    this.bar.setAttribute("aria-hidden", "true");
    this.parts = ["held", "cached", "free"].map((kind) => this.bar.appendChild(el("span", kind)));
    this.pagesWords = el("p", "pages-words");
    this.speed = el("p", "speed");
    this.links = el("p", "links-words");
    this.body.append(this.queues, this.bar, this.pagesWords, this.speed, this.links);
    this.item.append(head, this.reason, this.body);
    this.role = role;
  }

  lose() {
    this.item.dataset.state = "unknown";
    setText(this.word, "unknown");
    this.reason.hidden = true;
    this.body.hidden = true;
  }

  update(node) {
    this.item.dataset.state = node.state;
    const loaded = node.loaded === null ? "" : ` ${Math.floor(100 * node.loaded)} %`;
    setText(this.word, node.state + loaded);
    setText(this.reason, node.reason);
    this.reason.hidden = !node.reason;
    this.body.hidden = node.state !== "live";
    for (const [field, value] of this.cells) setText(value, count(node[field]));
    const pages = [node.num_held_pages, node.num_cached_pages, node.num_free_pages];
    pages.forEach((number, at) => (this.parts[at].style.flexGrow = number));
    setText(
      this.pagesWords,
      `${count(node.num_pages)} KV pages: ${count(pages[0])} held, ${count(pages[1])} cached, ${count(pages[2])} free`,
    );
    const moved = `${bytes(node.kv_bytes_per_s)}/s KV ${this.role === "decode" ? "in" : "out"}`;
    const by = Object.entries(node.links).map(([transport, number]) => `${count(number)} ${transport}`);
    const links = `${by.join(", ") || count(node.num_links)} ${node.num_links === 1 ? "link" : "links"}`;
    const retracted = node.num_retracted_reqs ? [`${count(node.num_retracted_reqs)} retracted`] : [];
    const tokens = this.role === "decode" ? `${rate(node.tokens_per_s)} tokens/s` : `${rate(node.prompt_tokens_per_s)} prompt tokens/s`;
    setText(this.speed, [tokens, moved, links, ...retracted].join(" · "));
    setText(this.links, node.links_words.join(" · "));
  }
}
