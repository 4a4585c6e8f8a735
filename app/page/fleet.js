// The fleet, where the page is served by a gateway or a replica: its servers, their tiers, and what became of turns.

import { askFor } from "./api.js";
import { bytes, counted, h, milliseconds, number, percent, withUnit } from "./dom.js";

const PERIOD_MS = 2000;
const CHANGED_MS = 4000; // how long a count stays marked after it has grown
const TIERS = [["hbm", "Device"], ["dram", "Memory"], ["disk", "Disk"]];
const MOVES = { wait: "it was too busy", dead: "it was gone", drain: "it was draining", refused: "it took no turns", asked: "an operator moved them" };

const panel = document.querySelector("#live");

export class Fleet {
  #section;
  #body = h("div", { data: { part: "fleet" } });
  #timer = null;
  #isWatched = false; // since the server is known to be in a fleet
  #counts = new Map(); // count -> its value when the page first saw it or it last grew, and when that was

  constructor() {
    const hint = "Servers that share conversations. A turn goes to the one that has its KV, its home.";
    this.#section = h("section", { hidden: true, "aria-labelledby": "fleet-title" }, h("h2", { id: "fleet-title" }, "The fleet"), h("p", { class: "small muted" }, hint), this.#body);
    panel.prepend(this.#section);
  }

  /** Look every two seconds while the live view is open, until `stop` or until the server says that there is nothing to
   * see: it is in no fleet, or wants another key. */
  start() {
    this.#isWatched = true;
    this.stop();
    const look = async () => {
      const goesOn = !panel.classList.contains("open") || (await this.#look());
      if (this.#timer === timer) this.#timer = timer = goesOn ? setTimeout(look, PERIOD_MS) : null;
    };
    let timer = setTimeout(look);
    this.#timer = timer;
  }

  /** Look again, if that had begun. */
  goOn() {
    if (this.#isWatched) this.start();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #look() {
    try {
      this.#show(await askFor("/v1/fleet?limit=48"));
    } catch (error) {
      if (error.status === 403) this.#draw(h("p", { class: "small note" }, "An admin key shows the servers."));
      return ![401, 403, 404].includes(error.status); // else the server is away for a moment, and what was shown stays
    }
    return true;
  }

  #draw(...nodes) {
    this.#section.hidden = false;
    this.#body.replaceChildren(...nodes.filter(Boolean));
  }

  #show(state) {
    const { states, gateway, kv } = state;
    const all = Object.values(states).reduce((sum, count) => sum + count, 0);
    const away = state.redis.state === "ok" ? null : h("p", { class: "small note" }, "The fleet's Redis does not answer. This is what was known before.");
    const list = h("ul", { class: "replicas", "aria-label": "Replicas" }, state.replicas.map(replica));
    const rest = state.has_more ? h("p", { class: "small muted" }, `and ${number(all - state.replicas.length)} more`) : null;
    this.#draw(
      away,
      h("div", { class: "tiles" },
        tile(`${number(states.ready ?? 0)} of ${number(all)}`, "take turns"),
        gateway && this.#tile("moves", gateway.moves, ["turn left its home", "turns left their home"], MOVES),
        gateway && this.#tile("resumes", { done: gateway.resumes.done }, ["answer went on elsewhere", "answers went on elsewhere"]),
        gateway?.resumes.lost ? this.#tile("lost", { lost: gateway.resumes.lost }, ["answer broke off", "answers broke off"]) : null),
      gateway ? h("p", { class: "small" }, routes(gateway.routes)) : null,
      kv ? meter("redis", "Redis", "KV for all servers", kv.used_bytes, kv.budget_bytes) : null,
      list,
      rest,
    );
  }

  /** A tile with the sum of counts, marked for a while after it has grown. `what`: the words for one and for
   * several; `reasons`: label -> words. */
  #tile(name, counts, [one, several], reasons = {}) {
    const sum = Object.values(counts).reduce((all, count) => all + count, 0);
    const known = this.#counts.get(name);
    const grown = known !== undefined && sum > known.sum;
    if (known === undefined || sum !== known.sum) this.#counts.set(name, { sum, at: grown ? Date.now() : 0 });
    const isNew = Date.now() - this.#counts.get(name).at < CHANGED_MS;
    const why = Object.entries(reasons).filter(([label]) => counts[label]).map(([label, words]) => `${number(counts[label])}: ${words}`);
    return tile(number(sum), sum === 1 ? one : several, { title: why.join(", ") || null, data: { changed: isNew } });
  }
}

function tile(value, what, properties = {}) {
  return h("div", { class: "tile", ...properties }, h("strong", {}, value), h("span", { class: "small muted" }, what));
}

function routes({ home, new: begun, moved, adopted, fallback }) {
  const words = [`Turns by where they went first: ${number(home)} at home`, `${number(begun)} new`, `${number(moved)} moved`];
  if (adopted) words.push(`${number(adopted)} whose home had let go of them`);
  if (fallback) words.push(`${number(fallback)} while Redis was away`);
  return words.join(", ");
}

function meter(key, label, what, used, capacity) {
  return h("div", { class: "tier" },
    h("div", { class: "tier-head" }, h("strong", {}, label), h("span", { class: "small muted" }, what)),
    bar(key, `${label} in use`, used, capacity),
    h("div", { class: "small" }, `${bytes(used)} of ${bytes(capacity)} (${percent(used, capacity)})`));
}

function bar(key, label, used, capacity, thin = "") {
  const share = capacity ? Math.min(1, used / capacity) : 0;
  const fill = h("span", { class: "fill", data: { source: key } });
  fill.style.width = `${share ? Math.max(1, share * 100) : 0}%`;
  return h("span", { class: `meter ${thin}`, role: "meter", title: `${bytes(used)} of ${bytes(capacity)}`, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100) }, fill);
}

function replica(one) {
  const state = one.silent ? "silent" : one.drained && one.state === "ready" ? "draining" : one.state;
  const facts = [counted(one.sessions, "conversation")];
  if (one.silent) facts.push("as it last said");
  else facts.push(`${number(one.running)} running`);
  if (!one.silent && one.waiting) facts.push(`${number(one.waiting)} waiting`);
  if (one.wait_s !== null) facts.push(one.wait_s < 0.001 ? "no wait" : `wait ${milliseconds(one.wait_s * 1000)}`);
  if (one.busy !== null) facts.push(`${withUnit(Math.round(100 * one.busy), "%")} busy`);
  const tiers = TIERS.filter(([key]) => one.tiers[key]?.capacity_bytes).map(([key, label]) => {
    const { used_bytes: used, capacity_bytes: capacity } = one.tiers[key];
    return h("div", {}, h("span", { class: "small muted" }, `${label} ${percent(used, capacity)}`), bar(key, `${one.replica}: ${label} in use`, used, capacity, "thin"));
  });
  return h("li", { class: "tier", data: { replica: one.replica } },
    h("div", { class: "tier-head" }, h("strong", { class: "name", title: one.url }, one.replica), h("span", { class: "state small", data: { state } }, state)),
    h("div", { class: "small" }, facts.join(", ")),
    tiers.length ? h("div", { class: "tiers" }, tiers) : null);
}
