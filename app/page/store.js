// Conversations in the browser's storage, each under its session id. Other tabs' changes are heard of; where two tabs
// wrote to one conversation at once, both are kept.

const INDEX = "reprise.conversations";
const ONE = "reprise.conversation.";
const LAST = "reprise.last";

export const DEFAULTS = {
  system: "", temperature: null, top_p: null, top_k: null, max_tokens: 300, repetition_penalty: null, seed: null,
};

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // damaged: as if it were not there
  }
}

/** [{id, title, updated}], the newest first. */
export function list() {
  return read(INDEX, []).toSorted((a, b) => b.updated - a.updated);
}

export function create() {
  return { id: newId(), title: "", updated: Date.now(), revision: 0, options: { ...DEFAULTS }, messages: [] };
}

function newId() {
  const name = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return `page-${name}`;
}

/** null where there is none of that id. */
export function load(id) {
  const found = read(ONE + id, null);
  return found && { revision: 0, ...found, options: { ...DEFAULTS, ...found.options } };
}

/** "kept"; "full": the browser's storage is; or "branched": another tab has changed or deleted the conversation since it
 * was read here, so this is one of its own now. An answer that has no text yet is left out. */
export function save(conversation) {
  const stored = load(conversation.id);
  const branched = (stored?.revision ?? 0) !== conversation.revision;
  if (branched) conversation.id = newId();
  const messages = conversation.messages.filter(({ role, content }) => role === "user" || content);
  const first = messages.find((message) => message.role === "user")?.content ?? "";
  conversation.title ||= first.trim().split("\n")[0].slice(0, 60);
  conversation.updated = Date.now();
  const before = conversation.revision;
  conversation.revision += 1;
  const entry = { id: conversation.id, title: conversation.title, updated: conversation.updated };
  try {
    localStorage.setItem(ONE + conversation.id, JSON.stringify({ ...conversation, messages }));
    localStorage.setItem(INDEX, JSON.stringify([entry, ...read(INDEX, []).filter((other) => other.id !== entry.id)]));
    localStorage.setItem(LAST, conversation.id);
  } catch {
    conversation.revision = load(conversation.id)?.revision ?? before;
    return "full";
  }
  return branched ? "branched" : "kept";
}

export function remove(id) {
  localStorage.removeItem(ONE + id);
  localStorage.setItem(INDEX, JSON.stringify(read(INDEX, []).filter((entry) => entry.id !== id)));
}

export const last = () => localStorage.getItem(LAST);

/** Another tab has changed the list of conversations (null), or one of them (its id). */
export function onChange(listener) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key === INDEX) listener(null);
    else if (key.startsWith(ONE)) listener(key.slice(ONE.length));
  });
}
