// Conversations as earlier versions of the page kept them.

import { chainOf } from "./fork.js";
import { DEFAULTS, FORMAT } from "./store.js";

const OLD_MAX_TOKENS = 300; // what format 1 wrote down where nobody had chosen a limit

/** A conversation of format 1, or null if it is damaged. */
export function readOld(text) {
  try {
    const { id, title, updated, revision, options, messages } = JSON.parse(text);
    const list = messages.map(({ role, content, report, stopped }) =>
      role === "user" ? { role, content } : { role, content, thought: "", report, end: stopped ? "stopped" : "stop" });
    if (options?.max_tokens === OLD_MAX_TOKENS) options.max_tokens = null;
    return { format: FORMAT, id, title, updated, revision: revision ?? 1, options: { ...DEFAULTS, ...options }, ...chainOf(list) };
  } catch {
    return null;
  }
}
