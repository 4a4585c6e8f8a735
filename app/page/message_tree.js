// The messages of a conversation as a tree: an edit or another answer stands beside what it replaces, and loses nothing.
// A conversation holds `messages`, a list in the order in which they were written, each with an `id` of its own and the
// id of its `parent` (null: it begins the conversation), and `head`, the id of the last message that is shown. Pure.

/** The messages that are shown and sent, from the first one to the head. */
export function path({ messages, head }) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const found = [];
  for (let message = byId.get(head); message && found.length < messages.length; message = byId.get(message.parent)) found.push(message);
  return found.reverse();
}

/** Write a message below `parent`, an id or null, and show it. Returns it. */
export function add(conversation, parent, message) {
  const id = conversation.messages.reduce((last, other) => Math.max(last, other.id), 0) + 1;
  const added = { id, parent, ...message };
  conversation.messages.push(added);
  conversation.head = id;
  return added;
}

/** Take a message out of which nothing has grown. The one above becomes the head if it was that. */
export function drop(conversation, message) {
  conversation.messages = conversation.messages.filter((other) => other.id !== message.id);
  if (conversation.head === message.id) conversation.head = message.parent;
}

/** What was written in the place of a message, itself too, in order. */
export function versions({ messages }, message) {
  return messages.filter(({ parent, role }) => parent === message.parent && role === message.role);
}

/** `versions` for many messages at once: a function of a message, for as long as the conversation stays as it is. */
export function versionsIn({ messages }) {
  const groups = Map.groupBy(messages, ({ parent, role }) => `${role} ${parent}`);
  return ({ parent, role }) => groups.get(`${role} ${parent}`) ?? [];
}

/** Show a message, and below it what was written last. */
export function choose(conversation, message) {
  let head = message;
  for (let below = message; below; below = conversation.messages.findLast(({ parent }) => parent === head.id)) head = below;
  conversation.head = head.id;
}
