// Markdown -> nodes. A model's text may say anything: nothing in it becomes markup, a script, or a load. Images become
// links, links go to http, https and mailto only. Time is linear in the text, and nesting is bounded.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 8;
const MAX_INLINE = 20_000; // characters of a paragraph beyond which it is shown as it is
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** A DocumentFragment. */
export function render(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const out = document.createDocumentFragment();
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) at += 1;
    else if ((match = FENCE.exec(line))) at = fence(lines, at, match, out);
    else if ((match = HEADING.exec(line))) {
      out.append(h(`h${Math.min(6, match[1].length + 2)}`, {}, inline(match[2].trimEnd().replace(/\s#+$/, ""))));
      at += 1;
    } else if (RULE.test(line)) {
      out.append(h("hr"));
      at += 1;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const start = at;
      while (at < lines.length && QUOTE.test(lines[at])) at += 1;
      out.append(h("blockquote", {}, blocks(lines.slice(start, at).map((quoted) => quoted.replace(QUOTE, "")), depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) at = list(lines, at, depth, out);
    else if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) at = table(lines, at, out);
    else at = paragraph(lines, at, out);
  }
  return out;
}

function fence(lines, at, [, marks, language], out) {
  const body = [];
  const close = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}\\s*$`);
  at += 1;
  while (at < lines.length && !close.test(lines[at])) body.push(lines[at++]);
  const code = h("code", {}, body.join("\n"));
  const copy = copyButton("Copy code", "copy", () => code.textContent);
  const head = h("div", { class: "code-head" }, h("span", {}, language), copy);
  out.append(h("div", { class: "code" }, head, h("pre", { tabIndex: 0 }, code)));
  return at + 1;
}

function list(lines, at, depth, out) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const element = h(ordered ? "ol" : "ul");
  if (ordered && parseInt(marker, 10) !== 1) element.start = parseInt(marker, 10);
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || match[1].length > indent.length + 1 || match[1].length < indent.length || /\d/.test(match[2]) !== ordered) break;
    const inner = indent.length + match[2].length + 1;
    const body = [match[3]];
    at += 1;
    // What is indented belongs to the item, and so does a line that just goes on.
    while (at < lines.length) {
      const next = lines[at];
      const indented = next.length - next.trimStart().length;
      if (next.trim() && indented < Math.min(inner, indent.length + 2)) {
        if (ITEM.test(next) || !body.at(-1).trim() || startsBlock(next)) break;
      } else if (!next.trim() && !(lines[at + 1] ?? "").startsWith(" ".repeat(indent.length + 2))) break;
      body.push(next.slice(Math.min(indented, inner)));
      at += 1;
    }
    element.append(h("li", {}, tight(blocks(body, depth + 1))));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  out.append(element);
  return at;
}

/** A list item's only paragraph needs no element of its own. */
function tight(fragment) {
  const first = fragment.firstElementChild;
  if (first?.tagName === "P") first.replaceWith(...first.childNodes);
  return fragment;
}

function table(lines, at, out) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const head = cells(lines[at]);
  const rows = [];
  at += 2;
  while (at < lines.length && lines[at].includes("|") && lines[at].trim()) rows.push(cells(lines[at++]));
  const heading = h("tr", {}, head.map((cell) => h("th", { scope: "col" }, inline(cell))));
  const body = rows.map((row) => h("tr", {}, head.map((_, n) => h("td", {}, inline(row[n] ?? "")))));
  const element = h("table", {}, h("thead", {}, heading), h("tbody", {}, body));
  out.append(h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" }, element));
  return at;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function paragraph(lines, at, out) {
  const start = at;
  do at += 1;
  while (at < lines.length && lines[at].trim() && !startsBlock(lines[at]) && !ITEM.test(lines[at]));
  out.append(h("p", {}, inline(lines.slice(start, at).join("\n"))));
  return at;
}

const EMPHASIS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[!<\nh]/g;

/** Nodes of one paragraph's text. */
function inline(text, depth = 0) {
  if (text.length > MAX_INLINE || depth > MAX_DEPTH) return [text];
  const nodes = [];
  const hopeless = new Set(); // markers of which no closing one is left: not looked for again
  let plain = "";
  let at = 0;
  const add = (node, length) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    const next = found ? found.index : text.length;
    plain += text.slice(at, next);
    at = next;
    if (!found) break;
    const span = spanAt(text, at, depth, hopeless);
    if (span) add(...span);
    else plain += text[at++];
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** [node, characters] of what begins at `at`, or null if it is text. */
function spanAt(text, at, depth, hopeless) {
  const character = text[at];
  if (character === "\n") return [h("br"), 1];
  if (character === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], 2] : null;
  if (character === "`") return codeAt(text, at, hopeless);
  if (character === "[" || (character === "!" && text[at + 1] === "[")) return linkAt(text, at, depth, hopeless);
  if (character === "<" || character === "h") return addressAt(text, at);
  for (const [marker, tag] of EMPHASIS) {
    if (!text.startsWith(marker, at) || hopeless.has(marker)) continue;
    const start = at + marker.length;
    const inWord = marker[0] === "_" && /\w/.test(text[at - 1] ?? "");
    if (inWord || /\s|^$/.test(text[start] ?? "")) continue;
    const end = closing(text, marker, start);
    if (end < 0) hopeless.add(marker);
    else if (end > start) return [h(tag, {}, inline(text.slice(start, end), depth + 1)), end + marker.length - at];
  }
  return null;
}

/** Where a marker closes: behind a character that is no space, and for single ones not in the middle of a double one. */
function closing(text, marker, start) {
  for (let end = text.indexOf(marker, start); end >= 0; end = text.indexOf(marker, end + 1)) {
    if (/\s/.test(text[end - 1]) || end === start) continue;
    if (marker.length === 2 && text[start] === marker[0] && text[end + 2] === marker[0]) continue; // ***both***
    if (marker.length === 1 && (text[end + 1] === marker || (text[end - 1] === marker))) continue;
    if (marker[0] === "_" && /\w/.test(text[end + marker.length] ?? "")) continue;
    return end;
  }
  return -1;
}

function codeAt(text, at, hopeless) {
  const marks = /^`+/.exec(text.slice(at, at + 32))[0];
  if (hopeless.has(marks)) return null;
  const end = text.indexOf(marks, at + marks.length);
  if (end < 0) {
    hopeless.add(marks);
    return null;
  }
  return [h("code", {}, text.slice(at + marks.length, end).replaceAll("\n", " ").trim()), end + marks.length - at];
}

function linkAt(text, at, depth, hopeless) {
  if (hopeless.has("](")) return null;
  const start = text.indexOf("[", at) + 1;
  const middle = text.indexOf("](", start);
  if (middle < 0) {
    hopeless.add("](");
    return null;
  }
  const end = text.indexOf(")", middle);
  const label = text.slice(start, middle);
  if (end < 0 || end - middle > 2048 || label.includes("[")) return null;
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0];
  const link = anchor(target, label.trim() ? inline(label, depth + 1) : [target]);
  return link && [link, end + 1 - at];
}

function addressAt(text, at) {
  const match = /^<?(https?:\/\/[^\s<>"'`]+)>?/.exec(text.slice(at, at + 2048));
  if (!match || (at > 0 && /\w/.test(text[at - 1]))) return null;
  const address = text[at] === "<" ? match[1] : match[1].replace(/[.,;:!?)\]*_]+$/, "");
  const link = anchor(address, [address]);
  return link && [link, text[at] === "<" ? match[0].length : address.length];
}

function anchor(target, children) {
  const url = URL.parse(target);
  if (!url || !SCHEMES.has(url.protocol)) return null;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, children);
}
