// Conversations that begin as a part of another one.

import { path } from "./message_tree.js";
import * as store from "./store.js";

/** A conversation of its own out of the messages down to one of them. */
export function forkAt(conversation, message) {
  const { title, options, id } = conversation;
  return { ...store.create(), ...structuredClone(chainTo(conversation, message)), title: forkTitle(title, store.list()), options: { ...options }, forked: { id, title } };
}

/** "Foxes (fork)", then "Foxes (fork 2)", also for a fork of a fork. */
function forkTitle(title, there) {
  const base = title.replace(/ \(fork(?: \d+)?\)$/, "");
  const taken = new Set(there.map((entry) => entry.title));
  let name = `${base} (fork)`;
  for (let count = 2; taken.has(name); count += 1) name = `${base} (fork ${count})`;
  return name;
}

/** The messages down to one of them as a chain of its own, for another conversation: {messages, head}. */
export function chainTo(conversation, message) {
  return chainOf(path({ ...conversation, head: message.id }));
}

/** {messages, head} of a plain list of messages, as conversations were kept before they were trees. */
export function chainOf(list) {
  const messages = list.map((message, place) => ({ ...message, id: place + 1, parent: place || null }));
  return { messages, head: messages.length || null };
}
