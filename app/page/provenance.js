// Where an answer's history came from, and what that saved: one line, and behind it a bar and the figures.

import { counted, h, icon, milliseconds, number, percent, withUnit } from "./dom.js";

export const SOURCES = [
  { key: "hbm", label: "on the device", what: "still on the device" },
  { key: "dram", label: "in memory", what: "from memory" },
  { key: "disk", label: "on disk", what: "from disk" },
  { key: "redis", label: "on another server", what: "from another server" },
  { key: "computed", label: "read now", what: "read now" },
  { key: "truncated", label: "no longer read", what: "no longer read, as the window was full" },
];
const CACHED = ["hbm", "dram", "disk", "redis"];
const FROM = { hbm: "on the device", dram: "from memory", disk: "from disk", redis: "from another server" };
const REASONS = {
  new: "new", evicted: "it had no room left", diverged: "something before it was changed", last_token: "the last token, from which the answer begins",
  load_failed: "it could not be fetched", load_late: "reading it anew was faster than the disk", cheaper_to_recompute: "reading it anew was faster",
  truncated: "the window was full and its beginning was dropped", lineage_reset: "a part before it was lost", disabled: "the server remembers nothing",
  expired: "it was not used for too long", salt: "it belongs to another salt", fingerprint: "another model had read it", prompt_logprobs: "its text is scored",
};
export const isReason = (name) => Object.hasOwn(REASONS, name);
const NO_LOSS = new Set(["new", "last_token"]); // reasons for which nothing that was read before is read again
const FAST_TOO = new Set(["cheaper_to_recompute", "load_late"]);
const HOUR_MS = 3_600_000;
const LEAST_SAVED_MS = 50;
const LEAST_SAVED_SHARE = 0.2; // of the time to the first word; less is within the error of the server's estimate
const MINOR_SHARE = 0.1; // of what was remembered: a source with less is not named in the line

/** Tokens by source, of an answer's `x_cache` or of a `turns` event. */
export function tokensOf(report) {
  return Object.fromEntries(SOURCES.map(({ key }) => [key, report[`${key}_tokens`] ?? 0]));
}

export function cachedTokens(tokens) {
  return CACHED.reduce((sum, key) => sum + tokens[key], 0);
}

export function promptTokens(tokens) {
  return cachedTokens(tokens) + tokens.computed;
}

/** The source that most of a prompt came from. */
export function mainSource(tokens) {
  const best = CACHED.reduce((found, key) => (tokens[key] > tokens[found] ? key : found), "hbm");
  return cachedTokens(tokens) >= tokens.computed ? best : "computed";
}

/** How long without what was remembered the first word would have taken, in ms; null where that is not known or hardly
 * longer. */
export function insteadOf({ tokens, ttft_ms: ttft, saved_ms: saved }) {
  if (!cachedTokens(tokens) || typeof saved !== "number" || typeof ttft !== "number") return null;
  return saved >= Math.max(LEAST_SAVED_MS, LEAST_SAVED_SHARE * ttft) ? ttft + saved : null;
}

/** What of the history was read again, and the reason for most of it: {tokens, why}; null where nothing was. */
function lossOf({ reasons, diverged, idle_ms: idle }) {
  const lost = Object.entries(reasons ?? {}).filter(([reason, count]) => count > 0 && !NO_LOSS.has(reason));
  if (!lost.length) return null;
  const [main] = lost.reduce((most, one) => (one[1] > most[1] ? one : most));
  const tokens = lost.reduce((sum, [, count]) => sum + count, 0);
  if (main === "diverged" && diverged?.sentence) return { tokens, why: diverged.sentence, main };
  if (main === "expired" && idle >= HOUR_MS) return { tokens, why: `not used for ${span(idle)}`, main };
  return { tokens, why: REASONS[main] ?? main, main };
}

/** The line under an answer, as [what is set off, the rest]. `report`: {tokens, ttft_ms, saved_ms, reasons, diverged,
 * idle_ms}. */
function words(report) {
  const { tokens, ttft_ms: ttft } = report;
  const cached = cachedTokens(tokens);
  const whole = promptTokens(tokens);
  const loss = lossOf(report);
  if (loss && loss.tokens > cached) return [FAST_TOO.has(loss.main) ? "Read now" : "Read anew", ` (${milliseconds(ttft)}): ${loss.why}`];
  const instead = insteadOf(report);
  const time = ` to the first word${instead === null ? "" : `, instead of about ${roughly(instead)}`}`;
  if (!cached) return [milliseconds(ttft), `${time} · read ${counted(whole, "token")}${report.reasons ? (whole === 1 ? ", a new one" : ", all of them new") : ""}`];
  const again = loss ? `; ${number(loss.tokens)} read anew: ${loss.why}` : "";
  return [milliseconds(ttft), `${time} · remembered ${number(cached)} of ${counted(whole, "token")}, ${from(tokens, cached)}${again}`];
}

/** The same as a sentence. */
export function inWords(report) {
  return words(report).join("");
}

function from(tokens, cached) {
  const named = CACHED.filter((key) => tokens[key] > MINOR_SHARE * cached).toSorted((a, b) => tokens[b] - tokens[a]);
  return named.slice(0, 2).map((key) => FROM[key]).join(" and ");
}

/** A time that is only estimated: two digits of it at most. */
export function roughly(ms) {
  if (ms < 1000) return withUnit(Number(ms.toPrecision(1)), "ms");
  const seconds = ms / 1000;
  if (seconds < 10) return withUnit(seconds.toFixed(1), "s");
  if (seconds < 100) return withUnit(Math.round(seconds), "s");
  return seconds < 5400 ? withUnit(Math.round(seconds / 60), "min") : withUnit((seconds / 3600).toFixed(seconds < 36_000 ? 1 : 0), "h");
}

function span(ms) {
  const hours = Math.round(ms / HOUR_MS);
  if (hours < 22) return hours === 1 ? "an hour" : counted(hours, "hour");
  const days = Math.max(1, Math.round(hours / 24));
  return days === 1 ? "a day" : counted(days, "day");
}

/** The line under an answer and what is folded behind it. `report`: as of `inWords`, and {timings, completion_tokens}. */
export function strip(report) {
  const { tokens } = report;
  const parts = SOURCES.filter(({ key }) => tokens[key] > 0);
  const [head, rest] = words(report);
  const line = h("span", {}, h("strong", {}, head), rest);
  const summary = h("summary", {}, line);
  if (insteadOf(report) !== null && !head.startsWith("Read")) icon(summary, "bolt");
  const folded = h("details", { class: "provenance", data: { sources: parts.map(({ key }) => key).join(" ") } }, summary,
    h("div", { class: "figures" }, bar(tokens, parts), legend(tokens, parts), figures(report)));
  // Those of the last answer would open below the edge.
  folded.addEventListener("toggle", () => folded.open && folded.scrollIntoView({ block: "nearest" }));
  return folded;
}

function bar(tokens, parts) {
  const total = parts.reduce((sum, { key }) => sum + tokens[key], 0);
  const description = parts.map(({ key, label }) => `${label} ${number(tokens[key])}`).join(", ");
  const drawn = h("div", { class: "bar", role: "img", "aria-label": `History by source, in tokens: ${description}` });
  for (const { key, what } of parts) {
    const part = h("span", { class: "part", data: { source: key }, title: `${counted(tokens[key], "token")} ${what}` });
    part.style.flexGrow = tokens[key] / total;
    drawn.append(part);
  }
  return drawn;
}

function legend(tokens, parts) {
  return h("ul", { class: "legend", "aria-hidden": "true" }, parts.map(({ key, label }) =>
    h("li", {}, h("span", { class: "swatch", data: { source: key } }), `${label} ${number(tokens[key])}`)));
}

function figures(report) {
  const rows = [];
  const timings = report.timings ?? {};
  const whole = promptTokens(report.tokens);
  rows.push(["remembered", percent(cachedTokens(report.tokens), whole)]);
  for (const [label, value] of [["in the queue", timings.queue_ms], ["fetching", timings.load_ms], ["reading", timings.prefill_ms]]) {
    if (value > 0) rows.push([label, milliseconds(value)]);
  }
  if (typeof report.saved_ms === "number") rows.push(["saved, about", insteadOf(report) === null ? "nothing" : roughly(report.saved_ms)]);
  if (timings.tokens_per_s) rows.push(["speed", withUnit(Math.round(timings.tokens_per_s), "tokens/s")]);
  if (report.completion_tokens) rows.push(["answer", counted(report.completion_tokens, "token")]);
  for (const [reason, count] of Object.entries(report.reasons ?? {})) {
    if (count) rows.push([`read now: ${REASONS[reason] ?? reason}`, counted(count, "token")]);
  }
  const why = report.diverged && h("p", { class: "why" }, `Why history was read anew: ${report.diverged.sentence}.`);
  return [why, h("dl", {}, rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))))].filter(Boolean);
}
