// Character references, such as &amp; and &#955;: the numeric ones, and of the named ones those of HTML 4.

const LATIN = "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave Uacute Ucirc Uuml Yacute THORN szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute thorn yuml";
const GREEK = "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho - Sigma Tau Upsilon Phi Chi Psi Omega";
const OTHERS = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", sigmaf: "ς", OElig: "Œ", oelig: "œ", Scaron: "Š", scaron: "š", Yuml: "Ÿ", fnof: "ƒ",
  circ: "ˆ", tilde: "˜", ensp: "\u2002", emsp: "\u2003", thinsp: "\u2009", zwnj: "\u200c", zwj: "\u200d", ndash: "–", mdash: "—",
  lsquo: "‘", rsquo: "’", sbquo: "‚", ldquo: "“", rdquo: "”", bdquo: "„", dagger: "†", Dagger: "‡", bull: "•", hellip: "…", permil: "‰",
  prime: "′", Prime: "″", lsaquo: "‹", rsaquo: "›", euro: "€", trade: "™", larr: "←", uarr: "↑", rarr: "→", darr: "↓", harr: "↔",
  lArr: "⇐", rArr: "⇒", hArr: "⇔", forall: "∀", part: "∂", exist: "∃", empty: "∅", nabla: "∇", isin: "∈", notin: "∉", prod: "∏",
  sum: "∑", minus: "−", radic: "√", prop: "∝", infin: "∞", ang: "∠", and: "∧", or: "∨", cap: "∩", cup: "∪", int: "∫", there4: "∴",
  sim: "∼", cong: "≅", asymp: "≈", ne: "≠", equiv: "≡", le: "≤", ge: "≥", sub: "⊂", sup: "⊃", sube: "⊆", supe: "⊇", oplus: "⊕",
  otimes: "⊗", perp: "⊥", sdot: "⋅", loz: "◊", spades: "♠", clubs: "♣", hearts: "♥", diams: "♦",
};
const REFERENCE = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-zA-Z][a-zA-Z\d]{1,9}));/g;

const NAMED = new Map([
  ...LATIN.split(" ").map((name, place) => [name, String.fromCharCode(0xa0 + place)]),
  ...GREEK.split(" ").flatMap((name, place) => [[name, String.fromCharCode(0x391 + place)], [name.toLowerCase(), String.fromCharCode(0x3b1 + place)]]),
  ...Object.entries(OTHERS),
]);

/** The text with its character references replaced; one that is not known stays. */
export function decode(text) {
  if (!text.includes("&")) return text;
  return text.replaceAll(REFERENCE, (found, decimal, hex, name) =>
    name ? NAMED.get(name) ?? found : character(decimal ? parseInt(decimal, 10) : parseInt(hex, 16)));
}

function character(code) {
  return code === 0 || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff) ? "\ufffd" : String.fromCodePoint(code);
}
