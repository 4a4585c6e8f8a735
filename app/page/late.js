// Formulas and the colours of code. They stand on the page as plain text at first; what draws them is loaded when the
// first of them comes.

const NEAR = "300px"; // so close to what is seen, code gets its colours
// Of code that gets colours. The rules of some languages take quadratic time in a line: 20,000 times "a" took 5 s.
const MAX_CODE_CHARS = 20_000;
const LONG_LINE = /[^\n]{1000}/;

const sources = new WeakMap(); // element -> {kind: "code", language, text} or {kind: "formula", isDisplay, text}
const drawn = new WeakSet(); // elements that are no longer plain text, or are to stay that
const waiting = new Set(); // formulas whose module is on its way
let typeset = null; // once it is there
let watcher = null;

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

async function drawFormulas() {
  if (!typeset) {
    try {
      ({ typeset } = await import("./math.js"));
    } catch (error) {
      console.info("Formulas stay as they are:", error);
      return;
    }
  }
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
    const { coloured } = await import("./code_colours.js");
    const nodes = await coloured(source.language, source.text);
    if (drawn.has(code) || sources.get(code) !== source) return;
    drawn.add(code);
    if (nodes) keepingSelection(code, () => code.replaceChildren(...nodes));
  } catch (error) {
    console.info("Code stays without colours:", error);
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
