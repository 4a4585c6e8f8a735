// Code -> nodes with colours, by Prism's rules. A language is loaded when the first code in it is seen.

import { h } from "./dom.js";
import { onDemand } from "./on_demand.js";

// Each language and those that its rules build upon. Markdown is not among them: 20 kB of empty lines took Prism 1.5 s.
const NEEDS = {
  bash: [], c: ["clike"], cpp: ["c"], csharp: ["clike"], css: [], diff: [], docker: [], go: ["clike"], java: ["clike"], javascript: ["clike"], json: [],
  jsx: ["markup", "javascript"], kotlin: ["clike"], lua: [], markup: [], "markup-templating": ["markup"], php: ["markup-templating", "clike"],
  powershell: [], python: [], ruby: ["clike"], rust: [], sql: [], swift: [], toml: [], tsx: ["jsx", "typescript"], typescript: ["javascript"], yaml: [], clike: [],
};
const NAMES = {
  "c#": "csharp", "c++": "cpp", cs: "csharp", dockerfile: "docker", golang: "go", h: "c", hpp: "cpp", html: "markup", js: "javascript", json5: "json", jsonc: "json",
  kt: "kotlin", mjs: "javascript", patch: "diff", ps1: "powershell", py: "python", py3: "python", python3: "python", rb: "ruby", rs: "rust",
  sh: "bash", shell: "bash", svg: "markup", ts: "typescript", xml: "markup", yml: "yaml", zsh: "bash", console: "bash",
};
// Which of Prism's kinds of tokens have which colour; others have none of their own.
const COLOURS = {
  comment: ["comment", "prolog", "doctype", "cdata", "shebang"],
  keyword: ["keyword", "atrule", "important", "rule", "directive", "tag", "module", "statement"],
  string: ["string", "char", "attr-value", "template-string", "regex", "url", "triple-quoted-string", "string-interpolation", "inserted", "raw-string"],
  number: ["number", "boolean", "constant", "symbol", "null", "nil", "unit", "color"],
  name: ["function", "class-name", "property", "attr-name", "key", "selector", "decorator", "builtin", "title", "macro", "table", "function-name"],
  deleted: ["deleted"],
};
const COLOUR_OF = new Map(Object.entries(COLOURS).flatMap(([colour, kinds]) => kinds.map((kind) => [kind, colour])));

document.head.append(h("link", { rel: "stylesheet", href: new URL("code.css", import.meta.url).href }));

const loading = new Map(); // language -> promise
let core = null;

/** Nodes of a code, or null for a language that is not known. */
export async function coloured(name, text) {
  const known = name.toLowerCase();
  const language = NAMES[known] ?? known;
  if (!Object.hasOwn(NEEDS, language)) return null;
  core ??= loadCore().catch(fails(() => { core = null; }));
  const prism = await core;
  await load(language);
  return nodes(prism.tokenize(text, prism.languages[language]));
}

/** Prism's files are made for a page of scripts: each looks for the others among the names of the page. */
async function loadCore() {
  globalThis.Prism = { manual: true, disableWorkerMessageHandler: true };
  globalThis.global = globalThis;
  await onDemand("vendor/prism/prism-core");
  delete globalThis.global;
  return globalThis.Prism;
}

function load(language) {
  if (!loading.has(language)) {
    const loaded = (async () => {
      for (const needed of NEEDS[language]) await load(needed);
      await onDemand(`vendor/prism/prism-${language}`);
    })();
    loading.set(language, loaded.catch(fails(() => loading.delete(language))));
  }
  return loading.get(language);
}

/** What could not be fetched is asked for again the next time: `forget()` what there is of it, and throw on. */
function fails(forget) {
  return (error) => {
    forget();
    throw error;
  };
}

function nodes(tokens, colour = null) {
  return [tokens].flat().flatMap((token) => {
    if (typeof token === "string") return colour ? h("span", { class: `code-${colour}` }, token) : token;
    const kinds = [token.type, ...[token.alias ?? []].flat()];
    return nodes(token.content, kinds.map((kind) => COLOUR_OF.get(kind)).find(Boolean) ?? colour);
  });
}
