// A text that grows on the page. Only what is new is drawn, so that a selection in what stands stays.

import { render } from "./markdown.js";

const RENDER_MS = 60; // between two looks at a text that grows

/** Turn the children of `shown` into those of `wanted` and leave all alone that is the same: everything but the end, since
 * a token may turn only what stands last into a list or a link. */
export function grow(shown, wanted) {
  const before = [...shown.childNodes];
  const after = [...wanted.childNodes];
  let same = 0;
  for (; same < before.length && same < after.length; same += 1) {
    const [old, fresh] = [before[same], after[same]];
    if (old.isEqualNode(fresh)) continue;
    if (old.nodeName !== fresh.nodeName || !goesOn(old, fresh)) break;
    if (old.nodeType === Node.TEXT_NODE) old.appendData(fresh.data.slice(old.data.length));
    else if (old.nodeName !== "BUTTON") grow(old, fresh); // a button says for a moment what it did
  }
  for (const gone of before.slice(same)) gone.remove();
  shown.append(...after.slice(same));
}

function goesOn(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) return fresh.data.startsWith(old.data);
  return old.nodeName === "BUTTON" || old.cloneNode(false).isEqualNode(fresh.cloneNode(false));
}

/** Draws a growing text into an element now and then. `drawn()` is called after each time. */
export class GrowingText {
  #element;
  #drawn;
  #text = "";
  #due = null;

  constructor(element, drawn) {
    this.#element = element;
    this.#drawn = drawn;
  }

  show(text) {
    if (text === this.#text) return;
    this.#text = text;
    this.#due ??= setTimeout(() => this.finish(), RENDER_MS + text.length / 100);
  }

  /** Draw what is there, now. */
  finish() {
    clearTimeout(this.#due);
    this.#due = null;
    grow(this.#element, render(this.#text));
    this.#drawn();
  }
}
