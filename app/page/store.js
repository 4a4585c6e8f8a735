// Conversations in the browser's database, each under its session id. Other tabs' changes are heard of; where two tabs
// wrote to one conversation at once, both are kept.

import { open, result, transact } from "./database.js";
import * as early from "./early_entries.js";
import { path } from "./message_tree.js";
import { onDemand } from "./on_demand.js";

const LAST = "reprise.last";
export const FORMAT = 2; // 1: a plain list of messages, in localStorage
const PATIENCE_MS = 5000; // at the start, with a database that a hanging disk keeps from answering
const OLD_INDEX = "reprise.conversations";
const OLD = "reprise.conversation.";

export const DEFAULTS = {
  system: "", temperature: null, top_p: null, top_k: null, max_tokens: null, repetition_penalty: null, seed: null,
};

const entries = new Map(); // id -> {id, title, updated}
const unkept = new Map(); // id -> conversation, where the browser has no database for us
const listeners = new Set();
const { channel } = early;
let database = null;
let started = null; // a promise
let writing = Promise.resolve(); // one after the other
let silent = false;

/** Open the database and bring what earlier versions of the page kept into it, once. Before anything else is called. */
export function start() {
  started ??= begin();
  return started;
}

async function begin() {
  try {
    database = await inTime(early.database);
    const readAgain = () => inDatabase("readonly", (stores) => result(stores.entries.getAll()));
    for (const entry of await inTime(early.entries.catch(readAgain))) entries.set(entry.id, entry);
    await bringOld().catch((error) => console.info("Older conversations stay where they are:", error));
    channel.onmessage = ({ data: { id } }) => hear(id);
    await Promise.all(early.changed.splice(0).map(hear));
  } catch (error) {
    channel.onmessage = null;
    database = null;
    silent = error.name === "TimeoutError";
    console.info("Conversations are not kept:", error);
  }
}

/** Whether the browser's database did not answer at the start: then the page goes on without what is in it. */
export function isSilent() {
  return silent;
}

/** What a promise resolves to. Rejects with a DOMException "TimeoutError" where it takes longer than PATIENCE_MS. */
function inTime(promise) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new DOMException("The database does not answer.", "TimeoutError")), PATIENCE_MS);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

/** As `transact`. A browser may close the database of a page that has slept; it is opened again. */
async function inDatabase(mode, work) {
  try {
    return await transact(database, mode, work);
  } catch (error) {
    if (error.name !== "InvalidStateError") throw error;
    database = await open();
    return transact(database, mode, work);
  }
}

/** What format 1 kept. */
async function bringOld() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(OLD));
  if (!keys.length) return localStorage.removeItem(OLD_INDEX);
  const { readOld } = await onDemand("old_format");
  const read = new Map(keys.map((key) => [key, readOld(localStorage.getItem(key))]).filter(([, conversation]) => conversation));
  const brought = await inDatabase("readwrite", async (stores) => {
    const all = [];
    for (const conversation of read.values()) {
      const there = await result(stores.entries.get(conversation.id)); // brought by another tab
      all.push(there ?? entryOf(conversation));
      if (there) continue;
      stores.conversations.put(conversation);
      stores.entries.put(entryOf(conversation));
    }
    return all;
  });
  for (const entry of brought) entries.set(entry.id, entry);
  for (const key of [...read.keys(), OLD_INDEX]) localStorage.removeItem(key);
}

function entryOf({ id, title, updated }) {
  return { id, title, updated };
}

/** [{id, title, updated}], the newest first. */
export function list() {
  return [...entries.values()].toSorted((a, b) => b.updated - a.updated);
}

export function create() {
  return { format: FORMAT, id: newId(), title: "", updated: Date.now(), revision: 0, options: { ...DEFAULTS }, messages: [], head: null };
}

function newId() {
  const name = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return `page-${name}`;
}

/** The name of a conversation that was given none. */
export function titleOf(conversation) {
  const first = path(conversation).find(({ role }) => role === "user")?.content ?? "";
  return first.trim().split("\n")[0].slice(0, 60);
}

/** null where there is none of that id. */
export async function load(id) {
  if (!id) return null;
  const found = database ? await inDatabase("readonly", (stores) => result(stores.conversations.get(id))) : unkept.get(id);
  return found ? { ...found, options: { ...DEFAULTS, ...found.options } } : null;
}

/** "kept"; "full": the browser's storage is; "unkept": it has none for us; or "branched": another tab has changed or
 * deleted the conversation since it was read here, so this is one of its own now. */
export function save(conversation) {
  return inTurn(async () => {
    await nextTask(); // to copy a long one takes a while, and what was just drawn is to be seen
    return write(conversation);
  });
}

/** Unlike a timer's, such a task comes at once, also in a tab that nobody sees. */
function nextTask() {
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/** Keep what has come of an answer so far, for a tab that is closed in the middle. Other tabs do not hear of it, and a
 * conversation that another tab has changed is left to `save`. */
export function saveProgress(conversation) {
  return inTurn(async () => {
    if (!database) return;
    await inDatabase("readwrite", async ({ conversations }) => {
      const stored = await result(conversations.get(conversation.id));
      if (stored?.revision === conversation.revision) conversations.put(conversation);
    }).catch(() => {});
  });
}

function inTurn(work) {
  const done = writing.then(work);
  writing = done.catch(() => {});
  return done;
}

async function write(conversation) {
  const before = { revision: conversation.revision, id: conversation.id, title: conversation.title };
  conversation.title ||= titleOf(conversation);
  conversation.updated = Date.now();
  let branched = false;
  try {
    if (database) {
      await inDatabase("readwrite", async (stores) => {
        const stored = await result(stores.conversations.get(conversation.id));
        branched = (stored?.revision ?? 0) !== conversation.revision;
        if (branched) Object.assign(conversation, { id: newId(), title: `${conversation.title} (another tab's)` });
        conversation.revision += 1;
        stores.conversations.put(conversation);
        stores.entries.put(entryOf(conversation));
      });
    } else unkept.set(conversation.id, conversation);
  } catch {
    Object.assign(conversation, before);
    return "full";
  }
  entries.set(conversation.id, entryOf(conversation));
  remember(conversation.id);
  channel.postMessage({ id: conversation.id });
  if (!database) return "unkept";
  if (before.revision === 0) askToStay();
  return branched ? "branched" : "kept";
}

/** Without it a browser may clear what a site keeps when the disk is full. */
function askToStay() {
  navigator.storage?.persist?.().catch(() => {});
}

/** Keep conversations that come from elsewhere, all or none. `grow(there, conversation)` writes into one that is here, and
 * returns whether it did. Returns how many were {added, grown}. Throws what the database does, such as when it is full. */
export function adopt(conversations, grow = () => false) {
  return inTurn(async () => {
    const known = conversations.filter(({ id }) => entries.has(id));
    const grown = new Set();
    const growOne = (there, conversation) => {
      if (!there || !grow(there, conversation)) return false;
      there.revision += 1;
      grown.add(there.id);
      return true;
    };
    const fresh = [...new Map(conversations.map((one) => [one.id, one])).values()].filter(({ id }) => !entries.has(id));
    if (database) {
      await inDatabase("readwrite", async (stores) => {
        for (const conversation of fresh) {
          stores.conversations.put(conversation);
          stores.entries.put(entryOf(conversation));
        }
        for (const conversation of known) {
          const there = await result(stores.conversations.get(conversation.id));
          if (growOne(there, conversation)) stores.conversations.put(there);
        }
      });
    } else {
      for (const conversation of fresh) unkept.set(conversation.id, conversation);
      for (const conversation of known) growOne(unkept.get(conversation.id), conversation);
    }
    for (const id of grown) channel.postMessage({ id });
    for (const conversation of fresh) {
      entries.set(conversation.id, entryOf(conversation));
      channel.postMessage({ id: conversation.id });
    }
    return { added: fresh.length, grown: grown.size };
  });
}

/** Give a conversation another name. It is no change of what was said: no tab's own becomes another one by it. */
export function rename(id, title) {
  return inTurn(async () => {
    const entry = entries.get(id);
    if (!entry) return;
    entry.title = title;
    if (database) {
      await inDatabase("readwrite", async (stores) => {
        const stored = await result(stores.conversations.get(id));
        if (!stored) return;
        stores.conversations.put({ ...stored, title });
        stores.entries.put(entryOf({ ...stored, title }));
      });
    }
    channel.postMessage({ id });
  });
}

/** Conversations by their ids, undefined where there is none. */
export async function loadAll(ids) {
  return database ? inDatabase("readonly", (stores) => Promise.all(ids.map((id) => result(stores.conversations.get(id))))) : ids.map((id) => unkept.get(id));
}

export function remove(id) {
  return inTurn(async () => {
    unkept.delete(id);
    if (database) {
      await inDatabase("readwrite", (stores) => {
        stores.conversations.delete(id);
        stores.entries.delete(id);
      });
    }
    if (entries.delete(id)) channel.postMessage({ id });
  });
}

function remember(id) {
  try {
    localStorage.setItem(LAST, id);
  } catch {} // full: the page then opens with a new conversation
}

export const last = () => localStorage.getItem(LAST);

/** Another tab has changed or deleted a conversation: `listener(id)`. */
export function onChange(listener) {
  listeners.add(listener);
}

async function hear(id) {
  const entry = await inDatabase("readonly", (stores) => result(stores.entries.get(id))).catch(() => undefined);
  if (entry) entries.set(id, entry);
  else entries.delete(id);
  for (const listener of listeners) listener(id);
}
