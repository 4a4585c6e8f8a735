// What of a conversation the model still reads: a meter in the composer, and where in the thread its window begins. Pure,
// but for the meter.

import { counted, h, number, withUnit } from "./dom.js";
import { promptTokens } from "./provenance.js";

const NEARLY_FULL = 0.9;

const place = document.querySelector("#window");

const isAnswer = ({ role, report }) => role === "assistant" && Boolean(report);

/** Tokens of the window that the conversation took at its last answer, or null if none is known. `messages`: its path. */
export function usedTokens(messages) {
  const last = messages.findLast(isAnswer);
  return last ? promptTokens(last.report.tokens) + (last.report.completion_tokens ?? 0) : null;
}

/** {message, tokens, recalled}: the first message of which the model still reads something, how many tokens before it are
 * dropped, and how many of those the last answer had brought back; null while it reads all. Each answer's report says how many tokens came before it, so that the place is known to
 * a message. A system prompt, which the server keeps, counts as if it came first and were dropped: what stands below the
 * place is read, and of what is above at most so much as that prompt is long. */
export function cutOf(messages) {
  const last = messages.findLast(isAnswer)?.report;
  const tokens = last?.tokens.truncated ?? 0;
  if (!tokens) return null;
  let first = 0;
  for (const [index, message] of messages.entries()) {
    if (!isAnswer(message)) continue;
    const before = promptTokens(message.report.tokens) + message.report.tokens.truncated;
    if (before > tokens) break;
    first = before + (message.report.completion_tokens ?? 0) > tokens ? index : index + 1;
  }
  return first && messages[first] ? { message: messages[first], tokens, recalled: last.recalled ?? 0 } : null;
}

/** Draw how much of the window is taken. `size`: the model's, in tokens, null while it is unknown. */
export function drawMeter(messages, size) {
  const used = usedTokens(messages);
  place.hidden = !size || used === null;
  if (place.hidden) return;
  const share = Math.min(1, used / size);
  const fill = h("span", { class: "fill", data: { full: share >= NEARLY_FULL } });
  fill.style.width = `${Math.max(1, share * 100)}%`;
  const words = `${thousands(used)} of ${thousands(size)}`;
  place.title = `The model's window: ${number(used)} of ${counted(size, "token")}${share < NEARLY_FULL ? "" : ". It reads the beginning no more when it is full"}`;
  place.replaceChildren(
    h("span", { class: "meter thin", role: "meter", "aria-label": "Window in use, in tokens", "aria-valuemin": 0, "aria-valuemax": size, "aria-valuenow": Math.min(used, size) }, fill),
    h("span", { class: "small muted" }, words));
}

function thousands(count) {
  return count < 1000 ? number(count) : withUnit((count / 1000).toFixed(count < 100_000 ? 1 : 0), "k");
}
