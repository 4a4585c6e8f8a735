// Conversations in the browser's storage, each under its session id. Other tabs' changes are heard of.

const INDEX = "reprise.conversations";
const ONE = "reprise.conversation.";
const LAST = "reprise.last";

export const DEFAULTS = {
  system: "", temperature: 0.3, top_p: 1, top_k: null, max_tokens: 300, repetition_penalty: 1.1, seed: null,
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
  const name = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id: `page-${name}`, title: "", updated: Date.now(), options: { ...DEFAULTS }, messages: [] };
}

/** null where there is none of that id. */
export function load(id) {
  const found = read(ONE + id, null);
  return found && { ...found, options: { ...DEFAULTS, ...found.options } };
}

/** Returns false when the browser's storage is full. */
export function save(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  conversation.title ||= first.trim().split("\n")[0].slice(0, 60);
  conversation.updated = Date.now();
  const entry = { id: conversation.id, title: conversation.title, updated: conversation.updated };
  try {
    localStorage.setItem(ONE + conversation.id, JSON.stringify(conversation));
    localStorage.setItem(INDEX, JSON.stringify([entry, ...read(INDEX, []).filter((other) => other.id !== entry.id)]));
    localStorage.setItem(LAST, conversation.id);
  } catch {
    return false;
  }
  return true;
}

export function remove(id) {
  localStorage.removeItem(ONE + id);
  localStorage.setItem(INDEX, JSON.stringify(read(INDEX, []).filter((entry) => entry.id !== id)));
}

export const last = () => localStorage.getItem(LAST);

export function onChange(listener) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key === INDEX) listener();
  });
}
