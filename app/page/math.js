// TeX -> MathML, by Temml. Its tree becomes nodes here, from a list of what there may be; its own way to nodes would
// also set attributes of style, which the page's policy forbids.

import { h } from "./dom.js";
import { onDemand } from "./on_demand.js";

const { default: temml } = await onDemand("vendor/temml");

const LARGEST_PT = 60; // of a space or a line that a formula asks for
const MAX_NODES = 5000;
const MAX_DEPTH = 100; // of nodes in one another
// Without `trust` there are no links, pictures, or attributes of HTML.
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 200, maxSize: [LARGEST_PT, LARGEST_PT], annotate: false, wrap: "none" };

const MATHML = "http://www.w3.org/1998/Math/MathML";
export const ELEMENTS = new Set([
  "math", "mrow", "mi", "mo", "mn", "ms", "mtext", "mspace", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts",
  "mprescripts", "none", "mfrac", "msqrt", "mroot", "mstyle", "mtable", "mtr", "mtd", "mpadded", "mphantom", "menclose",
]);
export const ATTRIBUTES = new Set([
  "accent", "columnalign", "depth", "display", "displaystyle", "fence", "form", "height", "largeop", "linethickness", "lspace", "mathvariant",
  "maxsize", "minsize", "movablelimits", "notation", "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width",
]);
const STYLES = new Set([
  "border", "borderTop", "borderBottom", "borderLeft", "borderRight", "fontStyle", "fontWeight", "height", "marginLeft", "mathDepth",
  "padding", "paddingBottom", "paddingLeft", "paddingRight", "paddingTop", "textAlign", "width",
]);
const VALUE = /^[\w .%+-]{0,60}$/;

document.head.append(h("link", { rel: "stylesheet", href: new URL("math.css", import.meta.url).href }));

/** Nodes of a formula, or null if it is none that can be read. */
export function typeset(tex, isDisplay) {
  try {
    const budget = { nodes: MAX_NODES };
    return built(temml.__renderToMathMLTree(tex, { ...OPTIONS, macros: {}, displayMode: isDisplay }), budget, 0);
  } catch {
    return null;
  }
}

function built(node, budget, depth) {
  if (budget.nodes-- === 0 || depth > MAX_DEPTH) throw new RangeError("The formula is too large.");
  if (typeof node.text === "string" && !node.children) return [document.createTextNode(node.text)];
  const children = (node.children ?? []).flatMap((child) => built(child, budget, depth + 1));
  if (!ELEMENTS.has(node.type)) return children;
  const element = document.createElementNS(MATHML, node.type);
  for (const [name, value] of Object.entries(node.attributes ?? {})) {
    if (ATTRIBUTES.has(name) && VALUE.test(value)) element.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(node.style ?? {})) {
    const property = name.replaceAll(/-(\w)/g, (_, letter) => letter.toUpperCase());
    if (STYLES.has(property) && VALUE.test(value)) element.style[property] = value;
  }
  const classes = (node.classes ?? []).filter((name) => /^[a-z\d-]{1,30}$/.test(name ?? ""));
  if (classes.length) element.setAttribute("class", classes.join(" "));
  element.append(...children);
  return [element];
}
