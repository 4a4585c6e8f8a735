// GET /openapi.json, for people: every operation, what it reads and what it answers.

import { askFor } from "./api.js";
import { h } from "./dom.js";

const MAX_DEPTH = 6; // a schema may hold itself
const MAX_BOUND = 1e9; // what is larger bounds nothing that anybody would send
const PREFIX = "#/components/schemas/";

const about = document.querySelector("#about");
const list = document.querySelector("#operations");
const find = document.querySelector("#find");

let schemas = {};

function resolved(schema) {
  return schema?.$ref ? { ...schemas[schema.$ref.slice(PREFIX.length)], ...schema, $ref: undefined } : (schema ?? {});
}

/** In one line, such as `string | null`. */
function kind(schema) {
  const known = resolved(schema);
  if (known.const !== undefined) return JSON.stringify(known.const);
  if (known.enum) return known.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = known.anyOf ?? known.oneOf;
  if (choices) return [...new Set(choices.map(kind))].join(" | ");
  if (known.type === "array") return `${kind(known.items)}[]`;
  if (known.properties && known.title) return known.title;
  return known.type ?? "anything";
}

function bounds(schema) {
  const known = resolved(schema);
  const parts = [known, ...(known.anyOf ?? [])];
  const first = (name) => parts.find((part) => part[name] !== undefined)?.[name];
  const said = [["minimum", "from"], ["exclusiveMinimum", "above"], ["maximum", "to"], ["exclusiveMaximum", "below"], ["maxLength", "characters up to"], ["maxItems", "items up to"]]
    .filter(([name]) => Math.abs(first(name)) < MAX_BOUND).map(([name, word]) => `${word} ${first(name)}`);
  if (known.default !== undefined && known.default !== null) said.push(`default ${JSON.stringify(known.default)}`);
  return said.join(", ");
}

/** The object behind a schema: itself, what its list holds, or the first of its choices that has fields. */
function objectOf(schema) {
  const known = resolved(schema);
  if (known.properties) return known;
  if (known.type === "array") return objectOf(known.items);
  return (known.anyOf ?? known.oneOf ?? []).map(objectOf).find(Boolean) ?? null;
}

function fields(schema, depth = 0) {
  const known = objectOf(schema);
  if (!known || depth > MAX_DEPTH) return null;
  const required = new Set(known.required ?? []);
  return h("ul", { class: "schema" }, Object.entries(known.properties).map(([name, property]) => {
    const line = [h("code", {}, name), h("span", { class: "small muted" }, ` ${kind(property)}${required.has(name) ? ", required" : ""}${bounds(property) ? `; ${bounds(property)}` : ""}${property.description ? `: ${property.description}` : ""}`)];
    if (!objectOf(property)) return h("li", {}, line);
    return h("li", {}, unfolding(h("details", {}, h("summary", {}, line)), () => fields(property, depth + 1)));
  }));
}

/** What is inside is drawn when somebody looks. */
function unfolding(details, draw) {
  details.addEventListener("toggle", () => details.append(draw() ?? ""), { once: true });
  return details;
}

function content(media) {
  const [type, { schema, "x-event-schema": event }] = media;
  const of = event ?? schema;
  return [h("p", { class: "small muted" }, `${type}${event ? ", each event:" : objectOf(of) ? ":" : `: ${kind(of)}`}`), fields(of)];
}

function body(operation) {
  const parts = operation.description ? [h("p", {}, operation.description)] : [];
  const section = (title, ...nodes) => parts.push(h("h2", {}, title), ...nodes.flat(2).filter(Boolean));
  if (operation.parameters) {
    section("Parameters", h("ul", { class: "schema" }, operation.parameters.map(({ name, in: place, schema }) =>
      h("li", {}, h("code", {}, name), h("span", { class: "small muted" }, ` in the ${place}, ${kind(schema)}${bounds(schema) ? `; ${bounds(schema)}` : ""}`)))));
  }
  if (operation.requestBody) section("Body", Object.entries(operation.requestBody.content).map(content));
  for (const [status, answer] of Object.entries(operation.responses)) {
    if (/^\d+$/.test(status)) section(`Answer ${status}`, Object.entries(answer.content ?? {}).map(content));
  }
  return h("div", {}, parts);
}

function draw(document_) {
  schemas = document_.components.schemas;
  about.textContent = `${document_.info.description} Version ${document_.info.version}. Where the server wants keys, send “Authorization: Bearer KEY”. Errors are {"error": {"message", "type", "param", "code"}}.`;
  const entries = Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => {
    const summary = h("summary", {}, h("span", { class: "method" }, method), h("code", {}, path), h("span", { class: "muted" }, operation.summary));
    const entry = unfolding(h("details", { class: "operation" }, summary), () => body(operation));
    return { entry, text: `${method} ${path} ${operation.summary}`.toLowerCase() };
  }));
  const none = h("p", { class: "muted", role: "status", hidden: true }, "No operation has all of these words.");
  list.replaceChildren(none, ...entries.map(({ entry }) => entry));
  find.addEventListener("input", () => {
    const words = find.value.toLowerCase().split(/\s+/);
    for (const { entry, text } of entries) entry.hidden = !words.every((word) => text.includes(word));
    none.hidden = entries.some(({ entry }) => !entry.hidden);
  });
}

try {
  draw(await askFor("/openapi.json"));
} catch (error) {
  about.textContent = error.status === 401 ? "This server wants a key: give it on the chat page, then come back." : `There is no description: ${error.message}`;
}
