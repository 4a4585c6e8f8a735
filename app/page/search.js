// Looks for a text in what was said in this browser's conversations.

import { list, loadAll } from "./store.js";

const MAX_FOUND = 50;
const READ_AT_ONCE = 16; // conversations: memory holds no more of them

/** Look for a text, whatever its capitals, while `isWanted()`. `heard(ids)` is called with the ids of the conversations in
 * which it occurs, at most MAX_FOUND, the newest first, each time there are more. */
export async function search(text, isWanted, heard) {
  const wanted = text.toLowerCase();
  const occursIn = (conversation) => conversation?.messages.some(({ content }) => content.toLowerCase().includes(wanted));
  const ids = list().map(({ id }) => id);
  const found = [];
  for (let at = 0; at < ids.length && found.length < MAX_FOUND && isWanted(); at += READ_AT_ONCE) {
    const some = ids.slice(at, at + READ_AT_ONCE);
    const read = await loadAll(some);
    const more = some.filter((_, place) => occursIn(read[place]));
    found.push(...more);
    if (more.length && isWanted()) heard(found.slice(0, MAX_FOUND));
  }
}
