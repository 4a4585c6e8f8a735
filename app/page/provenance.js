// Where an answer's history came from: one bar, and the same in words.

import { h, milliseconds, number, percent } from "./dom.js";

export const SOURCES = [
  { key: "hbm", label: "HBM", what: "still on the device" },
  { key: "dram", label: "DRAM", what: "loaded from memory" },
  { key: "disk", label: "disk", what: "loaded from disk" },
  { key: "redis", label: "Redis", what: "loaded from another server" },
  { key: "computed", label: "computed", what: "computed now" },
  { key: "truncated", label: "truncated", what: "dropped from the context, as the window was full" },
];
const CACHED = ["hbm", "dram", "disk", "redis"];
const REASONS = {
  new: "new", evicted: "evicted before", diverged: "behind an edit", last_token: "last token, whose logits are needed",
  load_failed: "could not be loaded", load_late: "came too late", cheaper_to_recompute: "cheaper than loading", truncated: "recomputed after a cut",
  lineage_reset: "behind a block that was lost", disabled: "reuse is off", expired: "expired", salt: "another salt",
  fingerprint: "another model",
};

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

/** A sentence about it. */
export function inWords(tokens) {
  const cached = cachedTokens(tokens);
  const whole = promptTokens(tokens);
  if (!cached) return `all ${number(whole)} prompt tokens were computed`;
  return `${percent(cached, whole)} of ${number(whole)} prompt tokens came from the cache`;
}

/** The line under an answer. `report`: {tokens, ttft_ms, timings, reasons, diverged, completion_tokens, stopped}. */
export function strip(report) {
  const { tokens } = report;
  const parts = SOURCES.filter(({ key }) => tokens[key] > 0);
  const total = parts.reduce((sum, { key }) => sum + tokens[key], 0);
  const description = parts.map(({ key, label }) => `${label} ${number(tokens[key])}`).join(", ");
  const bar = h("div", { class: "bar", role: "img", "aria-label": `History by source, in tokens: ${description}` });
  for (const { key, label, what } of parts) {
    const part = h("span", { class: "part", data: { source: key }, title: `${label}: ${number(tokens[key])} tokens ${what}` });
    part.style.flexGrow = tokens[key] / total;
    bar.append(part);
  }
  const legend = h("ul", { class: "legend", "aria-hidden": "true" }, parts.map(({ key, label }) =>
    h("li", {}, h("span", { class: "swatch", data: { source: key } }), `${label} ${number(tokens[key])}`)));
  const head = h("p", { class: "ttft" },
    h("strong", {}, milliseconds(report.ttft_ms)), " to the first token · ", inWords(tokens));
  return h("div", { class: "provenance", data: { sources: parts.map(({ key }) => key).join(" ") } }, head, bar, legend, details(report));
}

function details(report) {
  const rows = [];
  const timings = report.timings ?? {};
  for (const [label, value] of [["in the queue", timings.queue_ms], ["loading KV", timings.load_ms], ["prefill", timings.prefill_ms]]) {
    if (typeof value === "number") rows.push([label, milliseconds(value)]);
  }
  if (timings.tokens_per_s) rows.push(["speed", `${Math.round(timings.tokens_per_s)} tokens/s`]);
  if (report.completion_tokens) rows.push(["answer", `${number(report.completion_tokens)} tokens`]);
  for (const [reason, count] of Object.entries(report.reasons ?? {})) {
    if (count) rows.push([`computed: ${REASONS[reason] ?? reason}`, `${number(count)} tokens`]);
  }
  const why = report.diverged && h("p", { class: "why" }, `Why history was computed again: ${report.diverged.sentence}.`);
  if (!rows.length && !why) return null;
  const unfolded = h("details", {}, h("summary", {}, "Details"), why,
    h("dl", {}, rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))));
  // Those of the last answer would open below the edge.
  unfolded.addEventListener("toggle", () => unfolded.open && unfolded.scrollIntoView({ block: "nearest" }));
  return unfolded;
}
