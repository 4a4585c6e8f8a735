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

/** The messages down to one of them as a chain of its own, for another conversation: {messages, head}. */
export function chainTo(conversation, message) {
  return chainOf(path({ ...conversation, head: message.id }));
}

/** {messages, head} of a plain list of messages, as conversations were kept before they were trees. */
export function chainOf(list) {
  const messages = list.map((message, place) => ({ ...message, id: place + 1, parent: place || null }));
  return { messages, head: messages.length || null };
}
