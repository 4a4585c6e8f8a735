// The live view: what is in which tier, what moves between them, who waits, and what the first tokens took.

import { ttftChart } from "./chart.js";
import { bytes, counted, h, isolated, number, percent, withUnit } from "./dom.js";
import { cachedTokens, insteadOf, promptTokens, roughly } from "./provenance.js";

const TIERS = [
  { key: "hbm", label: "Device", what: "ready for use (HBM)" },
  { key: "dram", label: "Memory", what: "fetched in an instant (DRAM)" },
  { key: "disk", label: "Disk", what: "survives a restart" },
  { key: "redis", label: "Redis", what: "shared with other servers" },
];
const MOVED_MS = 4000; // how long a move stays marked

const panel = document.querySelector("#live");

document.head.append(h("link", { rel: "stylesheet", href: new URL("live.css", import.meta.url).href }));

/** Draws what a Feed tells into the panel. Loaded when that is opened first. */
export class Live {
  #feed;
  #before = null; // the state before this one
  #moves = new Map(); // "session tier" -> {bytes, until}
  #titles;
  #parts;

  /** `titles()`: session id -> title of the conversations that this browser knows. */
  constructor(feed, titles) {
    this.#feed = feed;
    this.#titles = titles;
    this.#parts = Object.fromEntries(["ttft", "tiers", "sessions", "queue"].map((name) => [name, h("div", { data: { part: name } })]));
    const section = (title, name, hint) => h("section", {}, h("h2", {}, title), h("p", { class: "small muted" }, hint), this.#parts[name]);
    panel.append(
      section("Time to the first word", "ttft", "A dot for each of the last answers, on a logarithmic scale. Long prompts take longer."),
      section("The hierarchy", "tiers", "What was read of all conversations (their KV cache) lies in these. What is full drops what is needed last."),
      section("Conversations", "sessions", "Those used last: their blocks of 32\u00a0tokens by tier; a block may be in several."),
      section("The queue", "queue", "Requests that wait, next first."),
    );
    this.#drawTurns();
    if (feed.state) this.#show(feed.state);
    if (feed.refusal) this.#refuse();
    feed.addEventListener("turns", () => this.#drawTurns());
    feed.addEventListener("state", ({ detail: state }) => this.#show(state));
    feed.addEventListener("refusal", () => this.#refuse());
  }

  #refuse() {
    this.#parts.tiers.replaceChildren(h("p", { class: "small note" }, this.#feed.refusal));
  }

  #show(state) {
    this.#noteMoves(state);
    this.#drawTiers(state);
    this.#drawSessions(state);
    this.#drawQueue(state);
    this.#before = state;
  }

  /** What grew in a tier since the state before has moved there. */
  #noteMoves(state) {
    const now = Date.now();
    const before = new Map(this.#before?.sessions.map((session) => [session.id, session]));
    for (const session of this.#before ? state.sessions : []) {
      for (const { key } of TIERS) {
        const change = (session.bytes[key] ?? 0) - (before.get(session.id)?.bytes[key] ?? 0);
        if (change) this.#moves.set(`${session.id} ${key}`, { change, until: now + MOVED_MS });
      }
    }
    for (const [name, move] of this.#moves) if (move.until < now) this.#moves.delete(name);
  }

  #drawTiers(state) {
    if (!state.tiers) {
      const note = state.scope === "own" ? "Your key shows your own conversations and requests; an admin key shows the tiers and the whole queue." : "The engine has not reported yet.";
      this.#parts.tiers.replaceChildren(h("p", { class: "small note" }, note));
      return;
    }
    const seconds = this.#before ? Math.max(0.2, state.at - this.#before.at) : null;
    const rate = (direction) => {
      const old = this.#before?.moved_bytes?.[direction] ?? 0;
      return seconds ? Math.max(0, (state.moved_bytes[direction] ?? 0) - old) / seconds : 0;
    };
    const nodes = [];
    if (state.replica) nodes.push(h("p", { class: "small muted of" }, `Of replica ${state.replica}, as are the conversations and the queue below.`));
    for (const { key, label, what } of TIERS) {
      const tier = state.tiers[key];
      if (!tier?.capacity_bytes) continue;
      if (nodes.at(-1)?.className === "tier") {
        const up = rate(`${key}_to_hbm`) + (key === "disk" ? rate("disk_to_dram") : 0);
        const down = rate(key === "disk" ? "dram_to_disk" : `hbm_to_${key}`);
        nodes.push(h("div", { class: "flow" }, flow("up", up), flow("down", down)));
      }
      const share = Math.min(1, tier.used_bytes / tier.capacity_bytes);
      const fill = h("span", { class: "fill", data: { source: key } });
      fill.style.width = `${share ? Math.max(1, share * 100) : 0}%`;
      nodes.push(h("div", { class: "tier" },
        h("div", { class: "tier-head" }, h("strong", {}, label), h("span", { class: "small muted" }, what)),
        h("div", { class: "meter", role: "meter", "aria-label": `${label} in use`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100) }, fill),
        h("div", { class: "small" }, `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)} (${percent(tier.used_bytes, tier.capacity_bytes)})`)));
    }
    const codec = codecLine(state.codec);
    if (codec) nodes.push(h("p", { class: "small muted", data: { part: "codec" } }, codec));
    this.#parts.tiers.replaceChildren(...nodes);
  }

  #drawSessions(state) {
    const shown = state.sessions;
    if (!shown.length) {
      this.#parts.sessions.replaceChildren(h("p", { class: "small note" }, "None yet. Send a message."));
      return;
    }
    const tiers = TIERS.filter(({ key }) => state.tiers?.[key]?.capacity_bytes || shown.some((session) => session.blocks[key]));
    const titles = this.#titles();
    const most = (session) => Math.max(1, ...Object.values(session.blocks));
    const rows = shown.map((session) => h("tr", { data: { running: session.running } },
      h("th", { scope: "row", title: session.id }, h("span", { class: "name" }, titles.get(session.id) ?? short(session.id)), h("span", { class: "small muted" }, `${counted(session.tokens, "token")}${session.running ? ", running" : ""}`)),
      tiers.map(({ key }) => {
        const blocks = session.blocks[key] ?? 0;
        const move = this.#moves.get(`${session.id} ${key}`);
        const fill = h("span", { class: "fill", data: { source: key } });
        fill.style.width = `${(100 * blocks) / most(session)}%`;
        const moved = move ? h("span", { class: `small moved ${move.change > 0 ? "in" : "out"}` }, `${move.change > 0 ? "+" : "−"}${bytes(Math.abs(move.change))}`) : null;
        return h("td", {}, h("span", { class: "meter thin", "aria-hidden": "true" }, fill), h("span", { class: "small" }, number(blocks)), moved);
      })));
    const head = h("tr", {}, h("th", { scope: "col" }, "Conversation"), tiers.map(({ label }) => h("th", { scope: "col" }, label)));
    const caption = h("caption", { class: "visually-hidden" }, "Blocks of the conversations used last, by tier");
    const table = h("table", { class: "sessions" }, caption, h("thead", {}, head), h("tbody", {}, rows));
    this.#parts.sessions.replaceChildren(table);
  }

  #drawQueue(state) {
    const { queue } = state;
    if (!queue) {
      this.#parts.queue.replaceChildren(h("p", { class: "small note" }, "No request waits."));
      return;
    }
    const outside = queue.waiting - queue.front.length;
    const running = state.running === null ? "" : `${number(state.running)} running, `;
    const line = h("p", { class: "small" }, `${running}${number(queue.waiting)} waiting (${queue.policy})`);
    const titles = this.#titles();
    const slots = queue.front.map((waiting) => {
      const title = isolated(titles.get(waiting.session_id) ?? short(waiting.session_id));
      const load = waiting.bytes_to_load ? `${bytes(waiting.bytes_to_load)} to fetch` : "nothing to fetch";
      const order = Object.entries(waiting.order).map(([name, value]) => `, ${name.replaceAll("_", " ")} ${Number(value.toFixed(1))}`).join("");
      const what = `${title}: ${load}, waits ${withUnit(waiting.waiting_s.toFixed(1), "s")}${order}`;
      const place = waiting.bytes_to_load ? 3 : waiting.hbm_tokens ? 1 : 2;
      return h("li", { class: "slot", title: what, data: { class: place, ahead: waiting.has_pages } },
        h("span", { "aria-hidden": "true" }, place), h("span", { class: "visually-hidden" }, what));
    });
    const parts = [line];
    if (slots.length) {
      parts.push(h("ol", { class: "window", "aria-label": "Requests that start next" }, slots));
      if (outside > 0) parts.push(h("p", { class: "small muted" }, `and ${number(outside)} after these`));
      parts.push(h("ul", { class: "legend" },
        [[1, "some of it is on the device"], [2, "nothing to fetch"], [3, "must be fetched"]].map(([n, what]) =>
          h("li", {}, h("span", { class: "slot sample", data: { class: n } }, n), what))));
    }
    this.#parts.queue.replaceChildren(...parts);
  }

  #drawTurns() {
    if (!this.#feed.turns.length) {
      this.#parts.ttft.replaceChildren(h("p", { class: "small note" }, "No answers yet."));
      return;
    }
    const totals = this.#feed.turns.map((turn) => turn.tokens);
    const whole = totals.reduce((sum, tokens) => sum + promptTokens(tokens), 0);
    const cached = totals.reduce((sum, tokens) => sum + cachedTokens(tokens), 0);
    const tile = (value, what) => h("div", { class: "tile" }, h("strong", {}, value), h("span", { class: "small muted" }, what));
    const saved = this.#feed.turns.reduce((sum, turn) => sum + (insteadOf(turn) === null ? 0 : turn.saved_ms), 0);
    this.#parts.ttft.replaceChildren(
      h("div", { class: "tiles" },
        saved ? tile(roughly(saved), "of reading saved") : null,
        tile(percent(cached, whole), "of what was sent was remembered")),
      ttftChart(this.#feed.turns));
  }
}

/** What is known of the codec of KV, or null where KV is kept as it is. */
function codecLine(codec) {
  if (!codec) return null;
  const found = codec.checks ? `${codec.recent_divergence.toPrecision(2)} nats a token in the last checks` : "not checked yet";
  if (!codec.is_on) return `The codec of KV was switched off, because it changed answers too much (${found}).`;
  return `Cold KV is coded (${codec.name}): ${found}.`;
}

function flow(direction, bytesPerS) {
  const arrow = direction === "up" ? "↑" : "↓";
  const words = direction === "up" ? "up" : "down";
  return h("span", { class: `small flow-${direction}`, data: { moving: bytesPerS > 0 } },
    h("span", { "aria-hidden": "true" }, arrow), h("span", { class: "visually-hidden" }, words), ` ${bytes(bytesPerS)}/s`);
}

function short(id) {
  return id.length > 14 ? `${id.slice(0, 12)}…` : id;
}
