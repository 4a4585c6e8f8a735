// Formulas and the colours of code. They stand on the page as plain text at first; what draws them is loaded when the
// first of them comes.

import { h } from "./dom.js";
import { onDemand } from "./on_demand.js";

const AGAIN_MS = 5000; // after which what could not be fetched is asked for again
const NEAR = "300px"; // so close to what is seen, code gets its colours
// Of code that gets colours. The rules of some languages take quadratic time in a line: 20,000 times "a" took 5 s.
const MAX_CODE_CHARS = 20_000;
const LONG_LINE = /[^\n]{1000}/;

const sources = new WeakMap(); // element -> {kind: "code", language, text} or {kind: "formula", isDisplay, text}
const drawn = new WeakSet(); // elements that are no longer plain text, or are to stay that
const waiting = new Set(); // formulas whose module is on its way
const uncoloured = new Set(); // codes whose colours could not be fetched
const note = h("p", { class: "small muted", role: "status" }); // below the text in which something could not be drawn
let typeset = null; // once it is there
let watcher = null;
let retry = null; // the timer of the next try

/** Remember what an element was made from, to draw it later. Returns the element. */
export function mark(element, source) {
  sources.set(element, source);
  return element;
}

/** What an element was made from, or undefined. */
export const sourceOf = (element) => sources.get(element);

export const isDrawn = (element) => drawn.has(element);

/** Draw the formulas below an element, and its code once that is seen. `open`: a child of it that still grows, whose code
 * is left as it is. The element is on the page. */
export function drawLate(root, open = null) {
  for (const place of root.querySelectorAll(".formula")) if (!drawn.has(place)) waiting.add(place);
  if (waiting.size) drawFormulas();
  for (const code of root.querySelectorAll(".code code")) {
    const { language, text } = sources.get(code);
    if (language && !drawn.has(code) && !open?.contains(code) && text.length <= MAX_CODE_CHARS && !LONG_LINE.test(text)) watch(code);
  }
}

/** Say that something is not drawn because it cannot be fetched, and try again after a while, as long as it is there. */
function putOff(element) {
  note.textContent = "Formulas or the colours of code cannot be fetched now. They come when the server is there again.";
  element.closest(".text")?.after(note);
  retry ??= setTimeout(() => {
    retry = null;
    for (const place of [...waiting]) if (!place.isConnected) waiting.delete(place);
    const codes = [...uncoloured].filter((code) => code.isConnected);
    uncoloured.clear();
    if (!waiting.size && !codes.length) return note.remove();
    if (waiting.size) drawFormulas();
    for (const code of codes) watch(code);
  }, AGAIN_MS);
}

async function drawFormulas() {
  if (retry !== null) return;
  if (!typeset) {
    try {
      ({ typeset } = await onDemand("math"));
    } catch {
      const [place] = waiting;
      return place && putOff(place);
    }
  }
  if (!uncoloured.size) note.remove();
  for (const place of waiting) {
    const { text, isDisplay } = sources.get(place);
    drawn.add(place);
    const nodes = typeset(text, isDisplay);
    if (!nodes) continue; // not a formula that can be read
    keepingSelection(place, () => place.replaceChildren(...nodes));
    if (isDisplay && place.scrollWidth > place.clientWidth) Object.assign(place, { tabIndex: 0 });
  }
  waiting.clear();
}

function watch(code) {
  watcher ??= new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) colour(target);
  }, { root: document.querySelector("#thread"), rootMargin: NEAR });
  watcher.observe(code);
}

async function colour(code) {
  watcher.unobserve(code);
  const source = sources.get(code);
  try {
    const { coloured } = await onDemand("code_colours");
    const nodes = await coloured(source.language, source.text);
    if (!waiting.size && !uncoloured.size) note.remove();
    if (drawn.has(code) || sources.get(code) !== source) return;
    drawn.add(code);
    if (nodes) keepingSelection(code, () => code.replaceChildren(...nodes));
  } catch {
    uncoloured.add(code);
    putOff(code);
  }
}

/** Change the nodes of an element, but not what is selected in it. */
function keepingSelection(element, change) {
  const selection = getSelection();
  const { anchorNode, anchorOffset, focusNode, focusOffset } = selection;
  const [anchor, focus] = [[anchorNode, anchorOffset], [focusNode, focusOffset]].map((place) => charsBefore(element, ...place));
  change();
  if (anchor === null && focus === null) return;
  const [newAnchor, newFocus] = [anchor, focus].map((chars) => chars !== null && placeAt(element, chars));
  selection.setBaseAndExtent(...(newAnchor || [anchorNode, anchorOffset]), ...(newFocus || [focusNode, focusOffset]));
}

/** How many characters of an element stand before a place in it, null for a place elsewhere. */
function charsBefore(element, node, offset) {
  if (!node || !element.contains(node)) return null;
  const range = document.createRange();
  range.setStart(element, 0);
  range.setEnd(node, offset);
  return range.toString().length;
}

function placeAt(element, chars) {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (chars <= node.data.length) return [node, chars];
    chars -= node.data.length;
  }
  return [element, element.childNodes.length];
}
