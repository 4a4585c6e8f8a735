// Conversations as files: all of them as JSON, which another browser reads, and one of them as Markdown for people.

import { merge } from "./graft.js";
import { path } from "./message_tree.js";
import { BOUNDS, isTaken } from "./options.js";
import { SOURCES, isReason } from "./provenance.js";
import * as store from "./store.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Answer of a tool", system: "System prompt" };
const KIND = "reprise-conversations";
const MAX_FILE_BYTES = 256 << 20;
const MAX_CONVERSATIONS = 20_000;
const MAX_MESSAGES = 20_000; // of one conversation
const MAX_MESSAGE_ID = 1e9; // of a message; the next one must still be exact
const MAX_TOKENS = 2 ** 31;
const MAX_MS = 1e10; // 116 days; a longer time is not one that was measured
const ID = /^[\w.:-]{1,100}$/;
const TIMINGS = ["queue_ms", "load_ms", "prefill_ms", "tokens_per_s", "ttft_ms"];
const ENDS = ["stop", "length", "stopped", "unknown"];

/** A Blob of all conversations. One after the other is read. */
export async function allAsJson() {
  const parts = [`{"kind": "${KIND}", "conversations": [\n`];
  for (const [place, { id }] of store.list().entries()) {
    const conversation = await store.load(id);
    if (conversation) parts.push(place ? ",\n" : "", JSON.stringify(conversation));
  }
  parts.push("\n]}\n");
  return new Blob(parts, { type: "application/json" });
}

/** What is shown of a conversation, without thoughts. Calls of tools and their results stand indented, as code. */
export function asMarkdown(conversation) {
  const said = path(conversation).map(({ role, content, folded = [] }) => {
    const beside = folded.map(({ name, text }) => `${name}:\n\n${text.replaceAll(/^/gm, "    ")}`);
    return `## ${NAMES[role]}\n\n${[content, ...beside].filter(Boolean).join("\n\n")}\n`;
  });
  return new Blob([`# ${conversation.title}\n\n${said.join("\n")}`], { type: "text/markdown" });
}

/** Let the browser keep a Blob as a file. */
export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  Object.assign(link, { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A name for a file out of a title. */
export function fileName(title, ending) {
  const name = title.replaceAll(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60);
  return `${name || "conversation"}.${ending}`;
}

/** Add the conversations of a file that are not here yet, and to those that are what only the file has, but to none of
 * `running`, the ids of those in which an answer is written. Returns how many were {added, grown, known}. Throws Error with a sentence for people
 * if the file is not one of ours; then nothing was added. */
export async function importJson(file, running) {
  if (file.size > MAX_FILE_BYTES) throw new Error("The file is larger than 256 MiB.");
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (found?.kind !== KIND || !Array.isArray(found.conversations)) throw new Error("The file holds no conversations of this page.");
  if (found.conversations.length > MAX_CONVERSATIONS) throw new Error(`The file holds more than ${MAX_CONVERSATIONS} conversations.`);
  const read = found.conversations.map((one, place) => {
    const conversation = conversationFrom(one);
    if (!conversation) throw new Error(`Conversation ${place + 1} of the file is damaged.`);
    return conversation;
  });
  const { added, grown } = await store.adopt(read, (there, one) => !running.includes(one.id) && merge(there, one));
  return { added, grown, known: read.length - added - grown };
}

/** A conversation of which every field is what it should be, or null. */
function conversationFrom(one) {
  if (!one || !ID.test(one.id) || !Array.isArray(one.messages) || one.messages.length > MAX_MESSAGES) return null;
  const messages = one.messages.map(messageFrom);
  if (!messages.length || messages.includes(null)) return null;
  const ids = new Set();
  for (const { id, parent } of messages) { // a parent comes before its children, so that nothing goes round in a circle
    if (ids.has(id) || (parent !== null && !ids.has(parent))) return null;
    ids.add(id);
  }
  return {
    ...store.create(), id: one.id, title: text(one.title).slice(0, 200), updated: Math.min(Number.isFinite(one.updated) ? Math.max(0, one.updated) : Infinity, Date.now()), revision: 1,
    options: optionsFrom(one.options), messages, head: ids.has(one.head) ? one.head : messages.at(-1).id,
  };
}

function messageFrom(one) {
  if (!one || !Number.isSafeInteger(one.id) || one.id > MAX_MESSAGE_ID || (one.parent !== null && !Number.isSafeInteger(one.parent)) || typeof one.content !== "string") return null;
  const common = { id: one.id, parent: one.parent, role: one.role, content: one.content };
  if (one.role === "user") return common;
  if (one.role !== "assistant") return null;
  return {
    ...common, thought: text(one.thought), thought_ms: time(one.thought_ms), report: reportFrom(one.report),
    end: ENDS.includes(one.end) ? one.end : null, limit: tokens(one.limit) || null,
  };
}

function optionsFrom(options) {
  const numbers = Object.keys(BOUNDS).map((name) => [name, isTaken(name, options?.[name]) ? options[name] : null]);
  return { system: text(options?.system), ...Object.fromEntries(numbers) };
}

function reportFrom(report) {
  if (!report?.tokens) return null;
  return {
    tokens: Object.fromEntries(SOURCES.map(({ key }) => [key, tokens(report.tokens[key]) ?? 0])),
    reasons: report.reasons ? Object.fromEntries(Object.entries(report.reasons).filter(([name, count]) => isReason(name) && tokens(count))) : null,
    ttft_ms: time(report.ttft_ms),
    saved_ms: time(report.saved_ms),
    idle_ms: time(report.idle_ms),
    recalled: tokens(report.recalled),
    completion_tokens: tokens(report.completion_tokens),
    guessed_tokens: tokens(report.guessed_tokens),
    begun_chars: tokens(report.begun_chars),
    timings: Object.fromEntries(TIMINGS.map((name) => [name, time(report.timings?.[name])])),
  };
}

const text = (value) => (typeof value === "string" ? value : "");
const time = (value) => (typeof value === "number" && value >= 0 && value <= MAX_MS ? value : null);
const tokens = (value) => (Number.isInteger(value) && value >= 0 && value <= MAX_TOKENS ? value : null);
