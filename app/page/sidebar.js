// The list of conversations: by day, searched, renamed, and one stop of the Tab key however many there are.

import { idle } from "./backlog.js";
import { h, icon, isolated, number } from "./dom.js";
import { onDemand } from "./on_demand.js";
import { stateInWords, timesOfEqual } from "./row_state.js";
import { MAX_SHOWN } from "./server_list.js";
import * as store from "./store.js";

const SEARCH_AFTER_MS = 200; // texts are looked through when the typing pauses
const MAX_TITLE_CHARS = 200;
const LONG = 100; // rows; in a longer list those out of sight are not laid out
const FIRST_ROWS = 40; // that get their buttons at once, a high window's full; the others when there is time, or one is reached
const LEAST_IDLE_MS = 4;
const SETTLING_MS = 10_000; // for which a turn that has just ended may not be in the server's list yet

const list = document.querySelector("#conversations");
const search = document.querySelector("#search");
const places = document.querySelector("#places"); // what the dots mean

/** Events: `open` with an id, `remove` and `rename` with an entry ({id, title}; `rename` with the new title), `pin` with
 * {id, title, pinned}, `leave` when Escape is pressed in the empty search field. */
export class Sidebar extends EventTarget {
  #current = null; // the id of the conversation that is open
  #running = [];
  #drawn = ""; // what is on the page, to leave it alone while it is the same
  #rowsDrawn = new Map(); // id -> {state, element, entry, hasButtons} of what stands in it
  #isFilling = false; // whether rows get their buttons when there is time
  #sections = new Map(); // name of a group -> {head, items}
  #inTexts = []; // ids of those that the search found in what was said
  #timer = null;
  #query = "";
  #isHeld = false; // while a button of the list is pressed: a row that is drawn anew would not hear of the click
  #server;

  /** `server`: a ServerList, whose conversations stand in the list beside those of this browser. */
  constructor(server) {
    super();
    this.#server = server;
    search.addEventListener("input", () => this.#search());
    search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") this.#rows()[0]?.focus();
      else if (event.key === "Enter") this.#rows()[0]?.click();
      else if (event.key === "Escape") {
        event.stopPropagation(); // an answer is not stopped from here
        if (!search.value) this.dispatchEvent(new Event("leave"));
        search.value = "";
        this.#search();
      } else return;
      event.preventDefault();
    });
    list.addEventListener("keydown", (event) => this.#press(event));
    list.addEventListener("click", ({ target }) => this.#click(target.closest("button")));
    for (const reached of ["pointerover", "focusin"]) list.addEventListener(reached, ({ target }) => this.#fill(target.closest("li")?.dataset.id));
    list.addEventListener("pointerdown", () => { this.#isHeld = true; });
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => this.#isHeld && setTimeout(() => this.#release()));
  }

  /** `running`: the ids of conversations in which an answer is written. */
  draw(current, running = this.#running) {
    this.#current = current;
    this.#running = running;
    if (this.#isHeld || list.querySelector("input")) return; // a name is being typed
    places.hidden = !this.#server.isKnown;
    const groups = this.#groups();
    const { unshown } = this.#server;
    const state = JSON.stringify([current, running, groups, unshown]);
    if (state === this.#drawn) return;
    this.#drawn = state;
    const item = list.contains(document.activeElement) ? document.activeElement.closest("li") : null;
    const [focused, place] = [item?.dataset.id, item && [...item.querySelectorAll("button")].indexOf(document.activeElement)];
    const at = item && this.#rows().indexOf(item.querySelector(".open"));
    const before = this.#rowsDrawn;
    this.#rowsDrawn = new Map();
    const parts = groups.flatMap(([name, entries]) => {
      const { head, items } = this.#section(name);
      arrange(items, entries.map((entry) => this.#rowDrawn(entry, before)));
      return [head, items];
    });
    if (!groups.length && this.#query) parts.push(h("p", { class: "small muted" }, "None is found."));
    if (unshown) parts.push(h("p", { class: "small muted unshown" }, this.#unshownInWords(unshown)));
    arrange(list, parts);
    const rows = this.#rows();
    list.classList.toggle("long", rows.length > LONG);
    stopAt(rows, rows.find((row) => row.getAttribute("aria-current")) ?? rows[0]);
    [...this.#rowsDrawn.keys()].slice(0, FIRST_ROWS).forEach((id) => this.#fill(id));
    this.#fillLater();
    if (focused && !list.contains(document.activeElement)) this.#focusAgain(focused, place, at);
  }

  /** The row that had the focus is another element now, or gone: then the one that stands in its place has it. */
  #focusAgain(id, button, at) {
    this.#fill(id);
    const rows = this.#rows();
    const buttons = this.#rowOf(id)?.closest("li").querySelectorAll("button");
    (buttons?.[button] ?? rows[Math.min(at, rows.length - 1)] ?? search).focus();
  }

  /** Give a row its buttons. */
  #fill(id) {
    const row = this.#rowsDrawn.get(id);
    if (!row || row.hasButtons) return;
    row.hasButtons = true;
    const { title, time, pinned, canPin } = row.entry;
    const name = `“${isolated(title)}”${time ? `, ${time}` : ""}`;
    const small = (act, label, picture) =>
      icon(h("button", { type: "button", class: "icon-button small", tabIndex: -1, "aria-label": `${label} ${name}`, title: label, data: { act } }), picture);
    row.element.append(h("span", { class: "row-buttons" }, small("rename", "Rename", "edit"),
      canPin ? small("pin", pinned ? "Unpin" : "Pin", "pin") : null, small("remove", "Delete", "trash")));
  }

  #fillLater() {
    if (this.#isFilling || [...this.#rowsDrawn.values()].every(({ hasButtons }) => hasButtons)) return;
    this.#isFilling = true;
    idle((time) => {
      this.#isFilling = false;
      for (const [id, { hasButtons }] of this.#rowsDrawn) {
        if (hasButtons) continue;
        if (time.timeRemaining() < LEAST_IDLE_MS) return this.#fillLater();
        this.#fill(id);
      }
    });
  }

  #click(button) {
    const { act } = button?.dataset ?? {};
    if (!act) return;
    const { id, title, pinned } = this.#rowsDrawn.get(button.closest("li").dataset.id).entry;
    if (act === "rename") this.rename(id);
    else this.dispatchEvent(new CustomEvent(act, { detail: { open: id, remove: { id, title }, pin: { id, title, pinned: !pinned } }[act] }));
  }

  #unshownInWords(unshown) {
    const more = number(unshown);
    return this.#query ? `Only the newest ${MAX_SHOWN} of the server were searched, not ${unshown === 1 ? "one older one" : `${more} older ones`}.` : `The server has ${more} more; the newest ${MAX_SHOWN} are shown.`;
  }

  #section(name) {
    if (!this.#sections.has(name)) this.#sections.set(name, { head: h("h2", { class: "small muted" }, name), items: h("ul", { "aria-label": name }) });
    return this.#sections.get(name);
  }

  /** The row of an entry: the one that there was, where nothing in it has changed. */
  #rowDrawn(entry, before) {
    const state = JSON.stringify([entry, entry.id === this.#current, this.#running.includes(entry.id)]);
    const there = before.get(entry.id);
    const row = there?.state === state ? there : { state, element: this.#row(entry), entry, hasButtons: false };
    this.#rowsDrawn.set(entry.id, row);
    return row.element;
  }

  #release() {
    this.#isHeld = false;
    this.draw(this.#current);
  }

  /** Let a name be typed in the place of the one that there is, which no search hides then. */
  rename(id) {
    if (this.#query && !this.#rowOf(id)) {
      search.value = "";
      this.#search();
    }
    const row = this.#rowOf(id);
    if (!row) return;
    const title = this.#entries().find((entry) => entry.id === id)?.title ?? "";
    const field = h("input", { type: "text", value: title, maxLength: MAX_TITLE_CHARS, class: "rename", "aria-label": "Name of the conversation" });
    let isClosed = false; // a field that is taken away loses the focus, which closes it too
    const close = (keep) => {
      if (isClosed) return;
      isClosed = true;
      const typed = field.value.trim();
      field.replaceWith(row);
      this.#drawn = "";
      if (keep && typed && typed !== title) this.dispatchEvent(new CustomEvent("rename", { detail: { id, title: typed } }));
      this.draw(this.#current);
      (this.#rowOf(id) ?? search).focus(); // a search may not find the new name
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) {
        event.preventDefault(); // else it would press the button that has the focus then
        close(true);
      } else if (event.key === "Escape") close(false);
    });
    row.replaceWith(field);
    field.addEventListener("blur", () => close(true));
    field.select();
  }

  /** Those of this browser and those that only the server has. */
  #entries() {
    const here = store.list();
    const others = this.#server.others(new Set(here.map(({ id }) => id)));
    const all = others.length ? [...here, ...others].toSorted((a, b) => b.updated - a.updated) : here;
    const times = timesOfEqual(all);
    return all.map((entry) => {
      const row = this.#server.get(entry.id);
      const isSettling = !row && Date.now() - entry.updated < SETTLING_MS;
      const place = isSettling ? null : this.#server.placeOf(entry.id);
      return { ...entry, time: times.get(entry.id) ?? "", place, says: stateInWords(place, row), pinned: row?.pinned ?? false, canPin: Boolean(row) && place !== "anew" };
    });
  }

  #row({ id, title, time, place, says, pinned }) {
    const shown = isolated(title);
    const open = h("button", {
      type: "button", class: "open", tabIndex: -1, title: says ? `${shown}\n${says}` : shown, "aria-current": id === this.#current ? "true" : undefined,
      "aria-keyshortcuts": "F2 Delete", data: says ? { act: "open", says } : { act: "open" },
    }, time ? h("span", { class: "name" }, title || "Untitled") : title || "Untitled", this.#running.includes(id) ? h("span", { class: "running" }, h("span", { class: "visually-hidden" }, ", an answer is written")) : null);
    if (time) open.append(h("span", { class: "visually-hidden" }, ", "), h("span", { class: "small muted time" }, time));
    const dot = place ? h("span", { class: "dot", "aria-hidden": "true", data: { place } }) : null;
    const mark = pinned ? icon(h("span", { class: "pinned", "aria-hidden": "true" }), "pin") : null;
    return h("li", { data: { id } }, dot, open, mark);
  }

  #rows() {
    return [...list.querySelectorAll(".open")];
  }

  #rowOf(id) {
    return this.#rows().find((row) => row.closest("li").dataset.id === id);
  }

  /** Arrows go through the list, and to the right to the buttons of a row. */
  #press(event) {
    const item = event.target.closest("li");
    if (!item) return;
    const rows = this.#rows();
    const at = rows.indexOf(item.querySelector(".open"));
    const buttons = [...item.querySelectorAll("button")];
    const inRow = buttons.indexOf(event.target);
    const to = {
      ArrowDown: rows[at + 1], ArrowUp: rows[at - 1] ?? search, Home: rows[0], End: rows.at(-1),
      ArrowRight: buttons[inRow + 1], ArrowLeft: buttons[inRow - 1],
    }[event.key];
    if (to) to.focus();
    else if (event.key === "Delete") buttons.at(-1).click();
    else if (event.key === "F2") this.rename(item.dataset.id);
    else return;
    event.preventDefault();
    event.stopPropagation();
    if (to?.matches(".open")) stopAt(rows, to);
  }

  #search() {
    this.#query = search.value.trim().toLowerCase();
    this.#inTexts = [];
    clearTimeout(this.#timer);
    if (this.#query) this.#timer = setTimeout(() => this.#searchTexts(this.#query), SEARCH_AFTER_MS);
    this.draw(this.#current);
  }

  async #searchTexts(query) {
    const found = await onDemand("search").catch(() => null); // without it names alone are searched
    await found?.search(query, () => query === this.#query, (ids) => {
      this.#inTexts = ids;
      this.draw(this.#current);
    });
  }

  /** [[name, entries]], without empty ones. */
  #groups() {
    const entries = this.#entries();
    if (this.#query) {
      const inTitles = entries.filter(({ title }) => title.toLowerCase().includes(this.#query));
      const inTexts = entries.filter((entry) => this.#inTexts.includes(entry.id) && !inTitles.includes(entry));
      return [["By name", inTitles], ["In what was said", inTexts]].filter(([, some]) => some.length);
    }
    const midnight = new Date().setHours(0, 0, 0, 0);
    const yesterday = new Date(midnight).setDate(new Date(midnight).getDate() - 1);
    const groups = Map.groupBy(entries, ({ updated }) => (updated >= midnight ? "Today" : updated >= yesterday ? "Yesterday" : "Earlier"));
    return [...groups.entries()];
  }
}

/** Let an element have these children, and leave those alone that are there in their order. */
function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove(); // else all that follow it would move
  let at = parent.firstChild;
  for (const child of children) {
    if (child === at) at = at.nextSibling;
    else parent.insertBefore(child, at);
  }
}

/** Let the Tab key stop at one of the rows. */
function stopAt(rows, stop) {
  for (const row of rows) if (row.tabIndex === 0 || row === stop) row.tabIndex = row === stop ? 0 : -1;
}
