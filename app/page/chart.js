// Time to first token over the last answers: a dot each, coloured and shaped by where most of its history came from.

import { counted, h, milliseconds, s, withUnit } from "./dom.js";
import { SOURCES, mainSource } from "./provenance.js";

const WIDTH = 340;
const HEIGHT = 150;
const LEFT = 46;
const BOTTOM = 18;
const TOP = 10;
const MOST = 60;

const labels = Object.fromEntries(SOURCES.map(({ key, label }) => [key, label]));

const SHAPES = {
  hbm: (x, y) => s("circle", { cx: x, cy: y, r: 4 }),
  dram: (x, y) => s("rect", { x: x - 3.6, y: y - 3.6, width: 7.2, height: 7.2 }),
  disk: (x, y) => s("path", { d: `M${x} ${y - 4.8}l4.600 8.200h-9.200Z` }),
  redis: (x, y) => s("path", { d: `M${x - 4} ${y}h8M${x} ${y - 4}v8`, class: "line" }),
  computed: (x, y) => s("path", { d: `M${x} ${y - 5}l5 5-5 5-5-5Z` }),
};

/** `turns`: [{ttft_ms, tokens, mine}], the oldest first. */
export function ttftChart(turns) {
  const shown = turns.slice(-MOST);
  const largest = Math.max(20, ...shown.map((turn) => turn.ttft_ms));
  const smallest = Math.max(0.5, Math.min(10, ...shown.map((turn) => turn.ttft_ms)));
  const low = Math.log10(smallest) - 0.1;
  const high = Math.log10(largest) + 0.1;
  const y = (ms) => TOP + ((high - Math.log10(Math.max(ms, 0.1))) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const step = (WIDTH - LEFT - 12) / Math.max(19, shown.length - 1);
  const x = (n) => WIDTH - 8 - (shown.length - 1 - n) * step;

  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": summary(shown) });
  for (const ms of [1, 10, 100, 1000, 10_000, 100_000]) {
    if (Math.log10(ms) < low || Math.log10(ms) > high) continue;
    const label = s("text", { x: LEFT - 6, y: y(ms) + 3.5, "text-anchor": "end" }, ms < 1000 ? withUnit(ms, "ms") : withUnit(ms / 1000, "s"));
    picture.append(s("line", { x1: LEFT, x2: WIDTH - 2, y1: y(ms), y2: y(ms), class: "grid" }), label);
  }
  picture.append(s("text", { x: WIDTH - 4, y: HEIGHT - 3, "text-anchor": "end" }, "latest answer"));
  shown.forEach((turn, n) => {
    const source = mainSource(turn.tokens);
    const dot = SHAPES[source](x(n), y(turn.ttft_ms));
    dot.dataset.source = source;
    dot.append(s("title", {}, `${milliseconds(turn.ttft_ms)}, mostly ${labels[source]}`));
    picture.append(dot);
  });
  const used = new Set(shown.map((turn) => mainSource(turn.tokens)));
  const legend = h("ul", { class: "legend" }, SOURCES.filter(({ key }) => used.has(key)).map(({ key, label }) => {
    const sample = s("svg", { viewBox: "0 0 12 12", class: "chart sample", "aria-hidden": "true" }, SHAPES[key](6, 6));
    sample.firstChild.dataset.source = key;
    return h("li", {}, sample, `mostly ${label}`);
  }));
  return h("div", {}, picture, legend);
}

/** The same in words. No medians by source: prompts of other lengths would be compared. */
function summary(turns) {
  const times = turns.map((turn) => turn.ttft_ms);
  const remembered = turns.filter((turn) => mainSource(turn.tokens) !== "computed").length;
  return `Time to the first word of the last ${counted(turns.length, "answer")}: ${milliseconds(Math.min(...times))} to ${milliseconds(Math.max(...times))}; in ${remembered} of them most was remembered`;
}
