// Brings a conversation that the server keeps into this browser, or what was said in it elsewhere.

import { ApiError, askFor } from "./api.js";
import { graft, graftBefore } from "./graft.js";
import { path } from "./message_tree.js";
import { onDemand } from "./on_demand.js";
import * as store from "./store.js";

const MAX_PAGES = 100; // of at most 1,000 messages or 4 MiB each
const PATIENCE_MS = 2000; // for which a turn waits to hear what was said elsewhere, and for a request that was just stopped to end
const BUSY_AGAIN_MS = 200;
const TAIL = 2; // messages at the end that tell whether a conversation went on elsewhere: every turn sends all that were before

/** A conversation out of what the server keeps of it, which is not in this browser yet. `row`: what the list says of it,
 * or undefined. One in which a program called tools is `isReadOnly`, and stays in the server alone. Throws ApiError, or Error
 * with a sentence for people if the page cannot show it. */
export async function bring(id, row) {
  const list = await all(id);
  const common = { ...store.create(), id, title: row?.title ?? "", updated: row?.updated ?? Date.now() };
  if (!isChat(list)) {
    const { programsWork } = await onDemand("programs_work");
    const shown = { ...common, ...programsWork(list), isReadOnly: true };
    shown.title ||= store.titleOf(shown);
    return shown;
  }
  const { system, messages } = asSaid(list);
  const conversation = { ...common, revision: 1 };
  conversation.options.system = system;
  graft(conversation, messages);
  conversation.title ||= store.titleOf(conversation);
  await store.adopt([conversation]).catch(() => Object.assign(conversation, { revision: 0 })); // full: it is shown all the same
  return (await store.load(id)) ?? conversation;
}

/** Add to a conversation what was said in it elsewhere: below what is shown here, or as versions. `row`: as of `bring`.
 * Returns the conversation as it is then, or null if nothing was added. Fails silently: it is shown as it is here. */
export async function catchUp(conversation, row) {
  const { id, revision } = conversation;
  try {
    if (conversation.isReadOnly) return await bring(id, row);
    const messages = await saidElsewhere(conversation);
    const now = await store.load(id);
    if (!messages || now?.revision !== revision) return null;
    const { head } = now;
    if (!graft(now, messages)) return null;
    if (!path(now).some((message) => message.id === head)) now.head = head; // it goes on from elsewhere: another version
    return (await store.save(now)) === "kept" ? now : null;
  } catch {
    return null;
  }
}

/** Add to a conversation, just before a turn is sent, what another device has said in it. `answer`: the one to be written;
 * `question`: the message that was just written, or null; `mayBeBusy`: whether the server was last heard to answer in it.
 * Returns whether the server has something else. Throws as `bring` does, if the server does not say it in time, and ApiError
 * "elsewhere" while another device's turn is answered, which this one would write over. */
export async function joinTurn(conversation, answer, question, { signal, mayBeBusy }) {
  if (mayBeBusy && (await isBusy(conversation.id, signal))) {
    throw new ApiError(409, "Another device writes an answer in this conversation. Go on when it is there.", "elsewhere", null);
  }
  const head = question ? question.parent : answer.content ? answer.id : answer.parent;
  const inTime = AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MS)]);
  const chain = await saidElsewhere(conversation, path({ ...conversation, head }), inTime);
  if (!chain) return false;
  if (question) graftBefore(conversation, chain, question);
  else {
    graft(conversation, chain);
    conversation.head = answer.id;
  }
  answer.end = null;
  return true;
}

/** Whether the server still answers a request of a conversation. One that was just stopped takes a moment to end. */
async function isBusy(id, signal) {
  for (const until = Date.now() + PATIENCE_MS; ; ) {
    const { running } = await askFor(`/v1/sessions/${encodeURIComponent(id)}`, signal);
    if (!running || Date.now() > until) return running;
    await new Promise((resolve) => setTimeout(resolve, BUSY_AGAIN_MS));
  }
}

/** The chain of messages that the server has of a conversation, or null where it ends as what is shown here does.
 * Throws as `bring` does. */
async function saidElsewhere(conversation, shown = path(conversation), signal) {
  const said = shown.filter(({ role, content }) => role === "user" || content); // an empty answer is not sent
  const before = said.length - TAIL + (conversation.options.system.trim() ? 1 : 0);
  if (said.length >= TAIL) {
    const { data, has_more: more } = await messagesAfter(conversation.id, before ? before - 1 : null, signal);
    const isSame = ({ role, content }, place) => role === data[place].role && content.trim() === asText(data[place].content).trim();
    if (!more && data.length === TAIL && said.slice(-TAIL).every(isSame)) return null;
  }
  const list = await all(conversation.id, signal);
  if (!isChat(list)) throw new ApiError(409, "A program has gone on with this conversation and called tools in it. Only it can go on.", "elsewhere", null);
  return asSaid(list).messages;
}

/** A page of the server's list. `after`: the place of the last message before it, or null. */
function messagesAfter(id, after, signal) {
  return askFor(`/v1/sessions/${encodeURIComponent(id)}/messages?limit=1000${after === null ? "" : `&after=${after}`}`, signal);
}

async function all(id, signal) {
  const found = [];
  let after = null;
  for (let pages = 0; pages < MAX_PAGES; pages += 1) {
    const page = await messagesAfter(id, after, signal);
    found.push(...page.data);
    if (!page.has_more) return found;
    after = page.last_id;
  }
  throw new Error("It is too long for this page.");
}

const isSystem = (message) => message?.role === "system" || message?.role === "developer";

/** Whether the page can go on with a conversation: no tools were called in it, and it has one system prompt at most. */
function isChat(list) {
  const said = list.slice(isSystem(list[0]) ? 1 : 0);
  return said.every(({ role, tool_calls: calls }) => role === "user" || (role === "assistant" && !calls?.length));
}

/** {system, messages} of the server's list, in which no tools were called. */
function asSaid(list) {
  const [first] = list;
  const hasSystem = isSystem(first);
  const messages = list.slice(hasSystem ? 1 : 0).map(({ role, content, reasoning_content: thought }) => {
    const text = asText(content);
    if (role === "user") return { role, content: text };
    return { role, content: text, thought: asText(thought), thought_ms: null, report: null, end: "unknown", limit: null };
  });
  if (!messages.length) throw new Error("The server keeps no messages of it.");
  return { system: hasSystem ? asText(first.content) : "", messages };
}

export function asText(content) {
  if (Array.isArray(content)) return content.map((part) => part?.text ?? "").join("");
  return typeof content === "string" ? content : "";
}
