// What of a conversation the model still reads: a meter in the composer, and where in the thread its window begins. Pure,
// but for the meter.

import { counted, h, number, withUnit } from "./dom.js";
import { promptTokens } from "./provenance.js";

const NEARLY_FULL = 0.9;

const place = document.querySelector("#window");

const isAnswer = ({ role, report }) => role === "assistant" && Boolean(report);

/** Of a stopped answer it is a guess. */
const completionTokens = ({ completion_tokens: told, guessed_tokens: guessed }) => told ?? guessed ?? 0;

/** Tokens of the window that the conversation took at its last answer, or null if none is known. `messages`: its path. */
export function usedTokens(messages) {
  const last = messages.findLast(isAnswer);
  return last ? promptTokens(last.report.tokens) + completionTokens(last.report) : null;
}

/** {message, tokens, recalled}: the first message of which the model still reads something, how many tokens are dropped, and
 * how many of those the last answer had brought back; null while it reads all. Reports say how many tokens came before each
 * answer; between two of them lengths tell. A system prompt, which the server keeps, counts as if it came first and were
 * dropped: of what is above the place at most so much is read as that prompt is long. */
export function cutOf(messages) {
  const last = messages.findLast(isAnswer);
  const tokens = last?.report.tokens.truncated ?? 0;
  if (!tokens) return null;
  const found = (message) => ({ message, tokens, recalled: last.report.recalled ?? 0 });
  let end = 0; // tokens up to here
  let next = 0; // message
  for (const [index, message] of messages.entries()) {
    if (!isAnswer(message)) continue;
    const between = messages.slice(next, index).map((one) => [one, charsOf(one)]);
    between.push([message, message.report.begun_chars ?? 0]); // which were in the prompt
    const before = promptTokens(message.report.tokens) + message.report.tokens.truncated;
    const perChar = Math.max(0, before - end) / between.reduce((sum, [, chars]) => sum + chars, 0);
    for (const [one, chars] of between) if ((end += chars * perChar || 0) > tokens) return found(one);
    end = before + completionTokens(message.report);
    if (end > tokens || message === last) return found(message);
    next = index + 1;
  }
}

export const charsOf = ({ content, thought }) => content.length + (thought?.length ?? 0);

/** Draw how much of the window is taken. `size`: the model's, in tokens, null while it is unknown. */
export function drawMeter(messages, size) {
  const told = usedTokens(messages);
  place.hidden = !size || told === null;
  if (place.hidden) return;
  const used = Math.min(told, size); // what did not fit was dropped
  const share = used / size;
  const fill = h("span", { class: "fill", data: { full: share >= NEARLY_FULL } });
  fill.style.width = `${Math.max(1, share * 100)}%`;
  const words = `${thousands(used)} of ${thousands(size)}`;
  place.title = `The model's window: ${number(used)} of ${counted(size, "token")}${share < NEARLY_FULL ? "" : ". It reads the beginning no more when it is full"}`;
  place.replaceChildren(
    h("span", { class: "meter thin", role: "meter", "aria-label": "Window in use, in tokens", "aria-valuemin": 0, "aria-valuemax": size, "aria-valuenow": used }, fill),
    h("span", { class: "small muted" }, words));
}

function thousands(count) {
  return count < 1000 ? number(count) : withUnit((count / 1000).toFixed(count < 100_000 ? 1 : 0), "k");
}
