// Markdown -> tokens: the lexer of `marked`, with HTML taken out, formulas and footnotes put in, and bounds on what a
// hostile text may cost.

import { Lexer, Tokenizer } from "./vendor/marked.js";

const MAX_CHARS = 1_000_000; // of a text; a longer one is shown as it is
const MAX_INLINE_CHARS = 20_000; // of a paragraph or cell: some rules of the lexer take quadratic time in it
const MAX_BLOCK_DEPTH = 8; // of lists and quotes in one another
const MAX_INLINE_DEPTH = 16; // of emphasis and links in one another
const MAX_TEX_CHARS = 4000; // of a formula
const MAX_LABEL = "{1,80}";
// What is not read within this time is shown as it is. Ordinary texts take a tenth of it at most.
const PATIENCE_MS = 500;
const PATIENCE_CHARS_PER_MS = 200;

const NEVER = /^(?!)/; // anchored: else it would be tried at every place
const NOTE = new RegExp(`^ {0,3}\\[\\^([^\\]\\s]${MAX_LABEL})\\]:[ \\t]*([^\\n]*(?:\\n(?:[ \\t]*\\n)*(?: {2}|\\t)[^\\n]*\\S[^\\n]*)*)`);
const NOTE_MARK = new RegExp(`^\\[\\^([^\\]\\s]${MAX_LABEL})\\]`);
const FORMULA_BLOCK = /^ {0,3}(?:\$\$|\\\[)/;
const AMOUNT = /^\d[\d.,]*\s+(?:\p{L}{2}|[\d.,\s]*$)/u; // "$5 and 6$" and "US$5, 6$" speak of money
const ORDINAL = /^(?:st|nd|rd|th|s)\b/; // "the $n$th", while "$HOME/$USER" is no formula

// A formula on lines of its own ends the paragraph above it: a line of it may look like a list or an underline.
const beforeFormula = (rule) => new RegExp(rule.source.replace("\\n(?!", () => "\\n(?! {0,3}(?:\\$\\$|\\\\\\[)|"), rule.flags);

const { block, inline } = Lexer.rules;
const BLOCK = { ...block.gfm, html: NEVER, paragraph: beforeFormula(block.gfm.paragraph), lheading: beforeFormula(block.gfm.lheading) };
const INLINE = { ...inline.breaks, tag: NEVER };

/** {tokens, links}. The tokens' `raw` add up to the text. Beside those of `marked` there are `plain` (a text that is shown
 * as it is), `formula` {text, isDisplay}, `note` {label, tokens} and `note_mark` {label}. `links`: what the text and `known`,
 * the links of a text that stands before it, define. Lines end in "\n" alone. */
export function lex(text, known = {}) {
  const asItIs = { tokens: [plain(text)], links: known };
  if (text.length > MAX_CHARS) return asItIs;
  try {
    const reader = new Reader(known, performance.now() + PATIENCE_MS + text.length / PATIENCE_CHARS_PER_MS);
    const tokens = reader.lex(text);
    return { tokens, links: { ...tokens.links } };
  } catch (error) {
    console.info("A text is shown as it is:", error);
    return asItIs;
  }
}

const plain = (text) => ({ type: "plain", raw: text, text });

class Reader extends Lexer {
  #until;
  #blockDepth = 0;
  #inlineDepth = 0;

  constructor(known, until) {
    super({
      gfm: true,
      breaks: true,
      tokenizer: new Rules(),
      hooks: { emStrongMask: withoutFormulas },
      extensions: { block: [function (text) { return this.lexer.beginBlock(text); }] },
    });
    this.#until = until;
    Object.assign(this.options.tokenizer.rules, { block: BLOCK, inline: INLINE });
    Object.assign(this.tokens.links, known);
  }

  get isLate() {
    return performance.now() > this.#until;
  }

  beginBlock(text) {
    return this.isLate ? plain(text) : formulaBlock(text);
  }

  blockTokens(text, tokens = [], isClipped = false) {
    if (this.#blockDepth === MAX_BLOCK_DEPTH) {
      this.state.top = true; // as it is left by the method itself
      tokens.push(plain(text));
      return tokens;
    }
    this.#blockDepth += 1;
    try {
      return super.blockTokens(text, tokens, isClipped);
    } finally {
      this.#blockDepth -= 1;
    }
  }

  inlineTokens(text, tokens = []) {
    if (text.length > MAX_INLINE_CHARS || this.#inlineDepth === MAX_INLINE_DEPTH || this.isLate) {
      tokens.push({ type: "text", raw: text, text });
      return tokens;
    }
    this.#inlineDepth += 1;
    try {
      return super.inlineTokens(text, tokens);
    } finally {
      this.#inlineDepth -= 1;
    }
  }
}

class Rules extends Tokenizer {
  /** Asked first at every place of a paragraph. */
  escape(text) {
    if (this.lexer.isLate) return { type: "text", raw: text, text };
    return formulaAt(text) ?? super.escape(text);
  }

  /** Ends where a formula may begin. */
  inlineText(text) {
    const at = text.indexOf("$", 1);
    return super.inlineText(at > 0 ? text.slice(0, at) : text);
  }

  def(text) {
    const match = NOTE.exec(text);
    if (!match) return super.def(text);
    const { lexer } = this;
    const { top } = lexer.state;
    lexer.state.top = true;
    const tokens = lexer.blockTokens(match[2].replaceAll(/\n(?: {2,4}|\t)/g, "\n"), []);
    lexer.state.top = top;
    return { type: "note", raw: match[0], tag: noteTag(match[1]), href: "", label: match[1], tokens };
  }

  reflink(text, links) {
    const match = text.startsWith("[^") ? NOTE_MARK.exec(text) : null;
    if (match && Object.hasOwn(links, noteTag(match[1]))) return { type: "note_mark", raw: match[0], label: match[1] };
    return super.reflink(text, links);
  }
}

const noteTag = (label) => `^${label.toLowerCase()}`; // among the links, of which none begins so otherwise

/** A formula that has lines of its own, as a block: $$ … $$ or \[ … \]. While its end is missing it stands as it is. */
function formulaBlock(text) {
  const open = FORMULA_BLOCK.exec(text)?.[0];
  if (!open) return undefined;
  const rest = text.slice(open.length, open.length + MAX_TEX_CHARS);
  const end = rest.indexOf(open.endsWith("$$") ? "$$" : "\\]");
  const inside = end < 0 ? rest : rest.slice(0, end);
  if (!inside.trim() || /\n[ \t]*\n/.test(inside)) return undefined;
  if (end < 0) return rest.length < MAX_TEX_CHARS ? plain(text) : undefined;
  const after = /^[ \t]*(?=\n|$)/.exec(rest.slice(end + 2));
  if (!after) return undefined;
  const raw = text.slice(0, open.length + end + 2 + after[0].length);
  return { type: "formula", raw, text: inside.trim(), isDisplay: true };
}

/** A formula at the beginning of a text, or undefined. */
function formulaAt(text) {
  const first = text[0];
  const second = text[1];
  if (first === "$" && second !== "$") return dollarFormula(text);
  const close = first === "$" ? "$$" : first !== "\\" ? "" : { "(": "\\)", "[": "\\]" }[second];
  if (!close) return undefined;
  const end = text.slice(0, MAX_TEX_CHARS).indexOf(close, 2);
  const tex = text.slice(2, end).trim();
  return end < 0 || !tex ? undefined : { type: "formula", raw: text.slice(0, end + 2), text: tex, isDisplay: close !== "\\)" };
}

/** $ … $: no space inside beside the marks, no digit behind. What may be amounts of money stays text. */
function dollarFormula(text) {
  if (/^\$\s/.test(text)) return undefined;
  const inside = /^\$((?:[^$\\]|\\[^])+)\$/.exec(text.slice(0, MAX_TEX_CHARS))?.[1];
  if (!inside || /\s$/.test(inside) || AMOUNT.test(inside)) return undefined;
  const behind = text.slice(inside.length + 2, inside.length + 6);
  if (/^[\d$]/.test(behind) || (/^\p{L}/u.test(behind) && !ORDINAL.test(behind))) return undefined;
  return { type: "formula", raw: `$${inside}$`, text: inside, isDisplay: false };
}

/** The text with formulas made unreadable, at the same length, so that no emphasis begins or ends in one. */
function withoutFormulas(text) {
  let masked = "";
  let from = 0;
  for (let at = text.indexOf("$"); at >= 0; at = text.indexOf("$", at)) {
    const formula = formulaAt(text.slice(at, at + MAX_TEX_CHARS));
    if (formula) {
      masked += text.slice(from, at) + "a".repeat(formula.raw.length);
      from = at + formula.raw.length;
    }
    at = formula ? from : at + 1;
  }
  return masked + text.slice(from);
}
