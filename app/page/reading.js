// What happens before the first word of an answer: how far its prompt is read, or its place in the queue. It stands where
// the caret would.

import { counted, h, number, percent, withUnit } from "./dom.js";

const TICK_MS = 250; // between two looks at the time that is left: a long step tells nothing meanwhile
const WORTH_TELLING_MS = 500; // a shorter wait is over before it is read

/** Words of an `x_progress` ({prompt_tokens, read_tokens, cached_tokens, ahead, left_ms}) that is `age_ms` old, or null where
 * there is too little to wait for. `place`: where the history lies ("disk", ...), if that is known. */
export function waitInWords(progress, place, age_ms) {
  const { prompt_tokens: whole, read_tokens: read, cached_tokens: cached, ahead, left_ms: left } = progress;
  if (ahead > 0) return `${ordinal(ahead + 1)} in the queue`;
  if (left !== null && left < WORTH_TELLING_MS) return null;
  if (!read && cached > whole / 2) return place === "disk" ? "Fetching from disk" : "Fetching what is remembered";
  const all = Math.max(0, whole - cached);
  const done = Math.min(all, Math.max(0, read - cached));
  if (!all) return null;
  const rest = left === null ? null : Math.max(1000, left - age_ms);
  const share = done ? ` ${percent(done, all)}` : "";
  const time = rest === null ? "" : ` about ${seconds(rest)}`;
  return `Reading ${counted(all, "token")} …${[share, time].filter(Boolean).join(",")}`;
}

function ordinal(count) {
  const tens = count % 100;
  const ending = tens > 10 && tens < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[count % 10] ?? "th";
  return `${number(count)}${ending}`;
}

function seconds(ms) {
  const all = Math.round(ms / 1000);
  return all < 120 ? withUnit(all, "s") : withUnit(Math.round(all / 60), "min");
}

/** A line that runs down by itself while it is on the page. */
export class Reading {
  element = h("div", { class: "reading muted", hidden: true });
  #shown = null; // {told, place, since}
  #timer = null;

  /** `progress`: {told, place, since}, an `x_progress` with where the history lies and when it was told; null: there is none
   * any more. */
  show(progress) {
    if (!progress) this.#stop();
    else if (progress !== this.#shown) {
      this.#shown = progress;
      this.#timer ??= setInterval(() => this.#draw(), TICK_MS);
      this.#draw();
    }
  }

  #draw() {
    if (!this.#shown || !this.element.isConnected) return;
    const { told, place, since } = this.#shown;
    const words = waitInWords(told, place, performance.now() - since);
    this.element.hidden = words === null;
    if (words !== null && this.element.textContent !== words) this.element.textContent = words;
  }

  #stop() {
    clearInterval(this.#timer);
    this.#timer = this.#shown = null;
    this.element.hidden = true;
  }
}
