// The conversations that the server keeps for this key: their names, where what was read of them lies, and until when they
// are kept. A server without these lists (an older one) is one of which nothing is known.

import { changeSession, listSessions } from "./api.js";

const MAX_PAGES = 20; // of 500 sessions
export const MAX_SHOWN = 500; // of conversations that only the server has, the newest
const MAX_STRANGERS = 200;
const SOON_MS = 1500; // a turn is in the list a moment after its end
const EVERY_MS = 60_000;
const MAX_TITLE_CHARS = 60; // of one that is made from the first text

/** Events: `change` when the list is another one. */
export class ServerList extends EventTarget {
  unshown = 0; // conversations that `others` left out when it was last asked
  isKnown = false; // whether the list is there and whole
  #rows = new Map(); // id -> row, see `rowOf`
  #unsaid = new Map(); // id -> a new title that the server has not taken yet
  #changes = 0; // made here; a list that was asked for before one of them is old
  #asking = false;
  #pages = 1; // of the list; a long one is asked for less often
  #timer = null;
  #strangers = new Set(); // sessions that the live view heard of and the list does not have

  /** What is known of a conversation: {id, title, firstText, updated, place, expires, pinned, running, count}, or undefined. `title`:
   * as it was set, or null; `place`: "ready", "disk" or "anew"; `expires`: when it is forgotten, ms, or null; `running`:
   * whether a request of it ran when the server was heard last; `count`: of its messages, or null. */
  get(id) {
    return this.#rows.get(id);
  }

  /** "ready", "disk", "anew", or null where it is not known. */
  placeOf(id) {
    return this.isKnown ? this.#rows.get(id)?.place ?? "anew" : null;
  }

  /** [{id, title, updated}] of conversations that can be shown again, without those in `here`, the newest first. */
  others(here) {
    const found = [...this.#rows.values()].filter(({ id, count }) => count && !here.has(id));
    this.unshown = Math.max(0, found.length - MAX_SHOWN);
    return found.toSorted((a, b) => b.updated - a.updated).slice(0, MAX_SHOWN)
      .map(({ id, title, firstText, updated }) => ({ id, title: title ?? (firstText.slice(0, MAX_TITLE_CHARS) || "Untitled"), updated }));
  }

  /** Titles that were set, elsewhere maybe, as [id, title]. */
  titles() {
    return [...this.#rows.values()].filter(({ id, title }) => title && !this.#unsaid.has(id)).map(({ id, title }) => [id, title]);
  }

  /** Ask now, and again every minute (a long list less often) while the page is seen. Fails silently: nothing depends on
   * the list. */
  async refresh() {
    clearTimeout(this.#timer);
    if (!document.hidden) this.#timer = setTimeout(() => this.refresh(), EVERY_MS * this.#pages);
    if (this.#asking) return this.refreshSoon();
    this.#asking = true;
    const changes = this.#changes;
    try {
      await this.#sayTitles();
      const found = await listAll();
      if (changes !== this.#changes) return this.refreshSoon();
      this.#rows = found.rows;
      this.#pages = found.pages;
      this.isKnown = found.isWhole;
      this.#tell();
    } catch {
      // What was known stays.
    } finally {
      this.#asking = false;
    }
  }

  refreshSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.refresh(), SOON_MS * this.#pages);
  }

  stop() {
    clearTimeout(this.#timer);
  }

  /** What the live view heard of the sessions used last. */
  hear(sessions) {
    let changed = false;
    for (const session of sessions) {
      const row = this.#rows.get(session.id);
      if (!Object.keys(session.blocks).length) { // its turn has begun, and no more is known of it
        if (row) row.running = session.running;
        continue;
      }
      if (!row) {
        if (!this.#strangers.has(session.id)) this.refreshSoon();
        if (this.#strangers.size >= MAX_STRANGERS) this.#strangers.clear();
        this.#strangers.add(session.id);
        continue;
      }
      const place = placeOf(session.blocks);
      changed ||= row.place !== place || row.pinned !== session.pinned;
      Object.assign(row, { place, pinned: session.pinned, running: session.running });
    }
    if (changed) this.#tell();
  }

  /** A conversation is gone. */
  forget(id) {
    this.#changes += 1;
    this.#unsaid.delete(id);
    if (this.#rows.delete(id)) this.#tell();
  }

  /** Give a conversation a name, also in the server; it is told again if it cannot be told now. */
  async rename(id, title) {
    const row = this.#rows.get(id);
    if (row) row.title = title;
    this.#changes += 1;
    this.#unsaid.set(id, title);
    this.#tell();
    await this.#sayTitles().catch(() => {});
  }

  async #sayTitles() {
    for (const [id, title] of this.#unsaid) {
      try {
        await changeSession(id, { title });
      } catch (error) {
        if (error.isAway || error.status === 503 || error.status === 429) throw error; // else it keeps no title of this one
      }
      if (this.#unsaid.get(id) === title) this.#unsaid.delete(id);
    }
  }

  /** Keep a conversation for ever, or no longer. Throws ApiError. */
  async pin(id, pinned) {
    const { expires_at: expires } = await changeSession(id, { pinned });
    this.#changes += 1;
    const row = this.#rows.get(id);
    if (row) Object.assign(row, { pinned, expires: expires === null ? null : expires * 1000 });
    this.#tell();
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}

async function listAll() {
  const rows = new Map();
  let after = "";
  for (let pages = 1; pages <= MAX_PAGES; pages += 1) {
    const page = await listSessions(after);
    for (const session of page.data) {
      if (session.cache_salt) continue; // its texts are not ours to ask for
      const row = rowOf(session);
      const other = rows.get(row.id); // the same one in another quality
      if (!other || (row.count ?? 0) > (other.count ?? 0)) rows.set(row.id, row);
    }
    if (!page.has_more) return { rows, pages, isWhole: true };
    after = page.last_id;
  }
  return { rows, pages: MAX_PAGES, isWhole: false };
}

function rowOf(session) {
  return {
    id: session.id, title: session.title ?? null, firstText: session.first_text ?? "", updated: session.last_used_at * 1000,
    place: placeOf(session.blocks), expires: session.expires_at === null ? null : session.expires_at * 1000,
    pinned: session.pinned, running: session.running ?? false, count: session.num_messages ?? null,
  };
}

/** Blocks may be in several tiers at once. What has to be read from disk for the most part is not ready. */
function placeOf({ hbm = 0, dram = 0, disk = 0, redis = 0 }) {
  const near = Math.max(hbm, dram);
  const far = Math.max(disk, redis);
  if (!near && !far) return "anew";
  return 2 * near >= far ? "ready" : "disk";
}
