// Markdown -> nodes. A model's text may say anything: nothing in it becomes markup, a script, or a load. Images become
// links, links go to http, https and mailto only, and every element that there can be is written below.

import { copyButton, h } from "./dom.js";
import { decode } from "./entities.js";
import { mark } from "./late.js";
import { lex } from "./markdown_lexer.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ALIGNED = { right: "right", center: "center" };

/** A DocumentFragment. Formulas and code stand in it as text; see `drawLate`. */
export function render(text) {
  return fragment(lex(text.replaceAll(/\r\n?/g, "\n")).tokens);
}

/** The nodes of tokens that `lex` has read. */
export function fragment(tokens) {
  const out = document.createDocumentFragment();
  out.append(...blocks(tokens));
  return out;
}

const blocks = (tokens) => tokens.flatMap((token) => (BLOCKS[token.type] ?? asItIs)(token) ?? []);
const inline = (tokens) => tokens.flatMap((token) => (INLINE[token.type] ?? ((other) => other.raw))(token));

const BLOCKS = {
  space: () => null,
  def: () => null,
  hr: () => h("hr"),
  heading: ({ depth, tokens }) => h(`h${Math.min(6, depth + 2)}`, {}, inline(tokens)),
  paragraph: ({ tokens }) => h("p", {}, inline(tokens)),
  text: ({ text, tokens }) => (tokens ? inline(tokens) : decode(text)), // of an item whose list has no space between them
  checkbox: checkbox,
  blockquote: ({ tokens }) => h("blockquote", {}, blocks(tokens)),
  code,
  list,
  table,
  formula,
  note: ({ label, tokens }) => h("div", { class: "footnote", data: { note: label }, tabIndex: -1 }, h("sup", {}, label), blocks(tokens)),
};

const INLINE = {
  text: ({ text }) => decode(text),
  escape: ({ text }) => text,
  codespan: ({ text }) => h("code", {}, text),
  strong: ({ tokens }) => h("strong", {}, inline(tokens)),
  em: ({ tokens }) => h("em", {}, inline(tokens)),
  del: ({ tokens }) => h("del", {}, inline(tokens)),
  br: () => h("br"),
  checkbox,
  link: ({ href, tokens, raw }) => anchor(href, inline(tokens), raw),
  image: ({ href, text, raw }) => anchor(href, [decode(text)], raw),
  formula,
  note_mark: ({ label }) => h("sup", {}, h("button", { type: "button", class: "footnote-mark", "aria-label": `Footnote ${label}`, on: { click: toNote } }, label)),
};

function asItIs({ raw }) {
  return h("p", { class: "plain" }, raw);
}

function code({ text, lang }) {
  const language = decode(lang ?? "").split(/[\s{,]/, 1)[0].slice(0, 40);
  const element = mark(h("code", {}, text), { kind: "code", language, text });
  const copy = copyButton("Copy code", "copy", () => element.textContent);
  const head = h("div", { class: "code-head" }, h("span", {}, language), copy);
  return h("div", { class: "code" }, head, h("pre", { tabIndex: 0 }, element));
}

function list({ ordered, start, items }) {
  const entries = items.map(({ task, tokens }) => h("li", { class: task ? "task" : null }, blocks(tokens)));
  const element = h(ordered ? "ol" : "ul", {}, entries);
  if (ordered && start !== 1) element.start = start;
  return element;
}

function checkbox({ checked }) {
  return [h("span", { class: "box", role: "img", "aria-label": checked ? "done" : "to do" }, checked ? "☑" : "☐"), " "];
}

function table({ header, rows }) {
  const cells = (tag, row, properties) => h("tr", {}, row.map(({ tokens, align }) => h(tag, { class: ALIGNED[align], ...properties }, inline(tokens))));
  const body = rows.map((row) => cells("td", row));
  const element = h("table", {}, h("thead", {}, cells("th", header, { scope: "col" })), h("tbody", {}, body));
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" }, element);
}

function formula({ raw, text, isDisplay }) {
  return mark(h("span", { class: isDisplay ? "formula display" : "formula" }, raw.trim()), { kind: "formula", isDisplay, text });
}

/** A link, or where it may not lead there what was written for it. */
function anchor(address, children, raw) {
  const url = URL.parse(decode(address));
  if (!url || !SCHEMES.has(url.protocol)) return raw;
  const shown = children.some((child) => (child.textContent ?? child).trim()) ? children : [url.href];
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, shown);
}

/** Go to the footnote of a mark. */
function toNote({ currentTarget: button }) {
  const notes = button.closest(".text")?.querySelectorAll(".footnote") ?? [];
  const note = [...notes].find(({ dataset }) => dataset.note.toLowerCase() === button.textContent.toLowerCase());
  note?.scrollIntoView({ block: "nearest" });
  note?.focus();
}
