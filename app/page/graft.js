// Joins to a tree of messages what was said in the same conversation elsewhere. Pure.

import { add, path, versions } from "./message_tree.js";

/** Write a chain of messages into the tree, those that are not there yet, and then show its end. An answer of which only a
 * part is there is made whole; one of which more is there is the same one. Returns how many were written. */
export function graft(conversation, chain) {
  let parent = null;
  let written = 0;
  for (const message of chain) {
    const there = conversation.messages.find((other) => other.parent === parent && isOne(other, message));
    const isStopped = there?.end === "stopped" && message === chain.at(-1); // the server wrote a few words more, at which nobody looked
    const isPart = there && !isStopped && there.content.trim().length < message.content.trim().length;
    if (isPart) Object.assign(there, { content: message.content, end: message.end });
    if (!there || isPart) written += 1;
    parent = (there ?? add(conversation, parent, message)).id;
  }
  return written;
}

function isOne(one, other) {
  if (one.role !== other.role) return false;
  if (one.content === other.content) return true;
  const [here, there] = [one.content.trim(), other.content.trim()];
  return one.role === "assistant" && Boolean(here && there) && (here.startsWith(there) || there.startsWith(here));
}

/** As `graft`, while a question at the end of the tree waits for its answer, which stands below it: it comes below what was
 * said elsewhere if that went on from the same place, unless it was asked in the place of another one. */
export function graftBefore(conversation, chain, question) {
  const { messages } = conversation;
  const isEdit = versions(conversation, question).length > 1;
  const own = messages.filter((message) => message === question || message.parent === question.id);
  const grown = { messages: messages.filter((message) => !own.includes(message)), head: question.parent };
  const written = graft(grown, chain);
  if (!written) return 0;
  if (!isEdit && path(grown).some(({ id }) => id === question.parent)) question.parent = grown.head;
  let id = Math.max(0, ...grown.messages.map((message) => message.id));
  for (const message of own) message.id = id += 1;
  for (const answer of own) if (answer !== question) answer.parent = question.id;
  Object.assign(conversation, { messages: [...grown.messages, ...own], head: own.at(-1).id });
  return written;
}

/** Write what another tree of the same conversation has into this one: messages as versions, and of those that are here what
 * is not known of them. In `other` a parent comes before its children. What is shown stays. Returns whether something changed. */
export function merge(conversation, other) {
  const below = Map.groupBy(conversation.messages, ({ parent }) => parent);
  const here = new Map([[null, null]]); // id in the other tree -> id here
  const taken = new Set();
  let last = conversation.messages.reduce((most, { id }) => Math.max(most, id), 0);
  let changed = false;
  for (const message of other.messages) {
    const parent = here.get(message.parent);
    const open = (below.get(parent) ?? []).filter((one) => one.role === message.role && !taken.has(one));
    let there = open.find(({ content }) => content.trim() === message.content.trim());
    there ??= open.find((one) => (one.end === "unknown" || one.end === null) && isOne(one, message)); // a part, maybe
    if (there) changed = complete(there, message) || changed;
    else {
      there = { ...message, id: last += 1, parent };
      conversation.messages.push(there);
      changed = true;
    }
    taken.add(there);
    here.set(message.id, there.id);
  }
  return changed;
}

/** Fill in what is not known of a message. Returns whether something was. */
function complete(message, other) {
  const before = JSON.stringify(message);
  const isLonger = message.content.trim().length < other.content.trim().length;
  if (isLonger) message.content = other.content;
  if (message.role === "assistant") {
    const isSame = message.content === other.content;
    if (isSame && (isLonger || message.end === "unknown" || message.end === null)) Object.assign(message, { end: other.end ?? message.end, limit: other.limit });
    message.thought ||= other.thought;
    message.thought_ms ??= other.thought_ms;
    message.report ??= other.report;
  }
  return JSON.stringify(message) !== before;
}
