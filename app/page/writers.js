// Which tab writes an answer: one that only reads it from the database should not call it broken off.

const PATIENCE_MS = 200; // in which another tab of this browser has replied

const channel = new BroadcastChannel("reprise.writers");

/** Reply to other tabs that ask about a conversation. `isWriting(id)`: whether this tab writes in it. */
export function replyWith(isWriting) {
  channel.addEventListener("message", ({ data }) => {
    if (data.asks && isWriting(data.asks)) channel.postMessage({ writes: data.asks });
  });
}

/** Whether another tab writes an answer in a conversation now. */
export function isWrittenElsewhere(id) {
  return new Promise((resolve) => {
    const heard = new AbortController();
    const settle = (found) => {
      heard.abort();
      resolve(found);
    };
    channel.addEventListener("message", ({ data }) => data.writes === id && settle(true), { signal: heard.signal });
    setTimeout(() => settle(false), PATIENCE_MS);
    channel.postMessage({ asks: id });
  });
}
