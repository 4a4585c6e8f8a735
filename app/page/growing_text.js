// A text that grows on the page. Only its last blocks are read and drawn again, so that a selection in what stands stays,
// and a long answer costs no more than a short one.

import { drawLate, isDrawn, mark, sourceOf } from "./late.js";
import { fragment } from "./markdown.js";
import { lex } from "./markdown_lexer.js";

const RENDER_MS = 60; // between two looks at a text that grows
const NOTHING = { chars: 0, text: "", nodes: 0, links: {}, all: "{}" };
const CHARS_PER_MS = 100; // of what is drawn again each time: a longer one is looked at less often

/** Turn the children of `shown`, from the one at `start` on, into those of `wanted` and leave all alone that is the same:
 * everything but the end, since a token may turn only what stands last into a list or a link. */
export function grow(shown, wanted, start = 0) {
  const before = [...shown.childNodes].slice(start);
  const after = [...wanted.childNodes];
  let same = 0;
  for (; same < before.length && same < after.length; same += 1) {
    const [old, fresh] = [before[same], after[same]];
    const [was, is] = [sourceOf(old), sourceOf(fresh)];
    if (was && is && isSameSource(was, is)) continue;
    if ((was || is) && (isDrawn(old) || !(was && is))) break;
    if (old.isEqualNode(fresh) && !was) continue;
    if (old.nodeName !== fresh.nodeName || !goesOn(old, fresh)) break;
    if (is) mark(old, is);
    if (old.nodeType === Node.TEXT_NODE) old.appendData(fresh.data.slice(old.data.length));
    else if (!isCopyButton(old)) grow(old, fresh); // such a button says for a moment what it did
  }
  for (const gone of before.slice(same)) gone.remove();
  shown.append(...after.slice(same));
}

const isSameSource = (one, other) => one.text === other.text && one.language === other.language && one.isDisplay === other.isDisplay;
const isCopyButton = (node) => node.nodeName === "BUTTON" && node.classList.contains("copy");

function goesOn(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) return fresh.data.startsWith(old.data);
  return (isCopyButton(old) && isCopyButton(fresh)) || old.cloneNode(false).isEqualNode(fresh.cloneNode(false));
}

/** Draws a growing text into an element now and then. `drawn()` is called after each time. */
export class GrowingText {
  #element;
  #drawn;
  #text = "";
  #due = null;
  // What will not change any more: so many characters of the text, the nodes that they became, and the links that they
  // define. `all`: the links of the whole text, as JSON, with which that was drawn.
  #settled = NOTHING;

  constructor(element, drawn) {
    this.#element = element;
    this.#drawn = drawn;
  }

  show(text) {
    if (text === this.#text) return;
    this.#text = text;
    this.#due ??= setTimeout(() => this.#draw(), RENDER_MS + (text.length - this.#settled.chars) / CHARS_PER_MS);
  }

  /** Draw the whole text, now. */
  finish() {
    this.#settled = NOTHING;
    this.#draw(true);
  }

  #draw(isWhole = false) {
    clearTimeout(this.#due);
    this.#due = null;
    const text = this.#text.replaceAll(/\r\n?/g, "\n");
    if (!text.startsWith(this.#settled.text)) this.#settled = NOTHING;
    let { chars, nodes, links, all } = this.#settled;
    let read = lex(text.slice(chars), links);
    if (chars && JSON.stringify(read.links) !== all) { // what stands may lead elsewhere now
      [chars, nodes, links] = [0, 0, {}];
      read = lex(text);
    }
    all = JSON.stringify(read.links);
    const settling = isWhole ? 0 : settledTokens(read.tokens);
    const wanted = fragment(read.tokens.slice(0, settling));
    const more = wanted.childNodes.length;
    wanted.append(fragment(read.tokens.slice(settling)));
    grow(this.#element, wanted, nodes);
    drawLate(this.#element, isWhole ? null : this.#element.lastElementChild);
    const taken = read.tokens.slice(0, settling).reduce((sum, { raw }) => sum + raw.length, chars);
    if (settling && JSON.stringify(links) !== all) ({ links } = lex(text.slice(chars, taken), links));
    this.#settled = { chars: taken, text: text.slice(0, taken), nodes: nodes + more, links, all };
    this.#drawn();
  }
}

/** How many of the tokens nothing that follows can change: those before an empty line behind which two blocks begin. */
function settledTokens(tokens) {
  let blocks = 0;
  for (let at = tokens.length - 1; at > 0; at -= 1) {
    if (tokens[at].type !== "space") blocks += 1;
    if (blocks >= 2 && tokens[at].type !== "space" && tokens[at - 1].type === "space") return at;
  }
  return 0;
}
