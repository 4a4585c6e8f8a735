// A conversation in which a program called tools, for people to read: calls, results and inner system prompts are folded
// texts, and nothing in them is run. Pure.

import { asText } from "./bring.js";
import { chainOf } from "./fork.js";

const MAX_NAME_CHARS = 60; // of a tool, in the line that is seen while a text is folded

/** {messages, head} of the server's list of messages. A message with `folded` has texts beside what was said, as [{name,
 * text}]; one of the role "tool" or "system" has nothing else. */
export function programsWork(list) {
  if (!list.length) throw new Error("The server keeps no messages of it.");
  const called = new Map(); // id of a call -> name of its tool
  return chainOf(list.map((message) => {
    for (const { id, function: { name } } of message.tool_calls ?? []) called.set(id, shortened(name));
    return asShown(message, called);
  }));
}

function asShown({ role, content, tool_calls: calls, tool_call_id: id, reasoning_content: thought }, called) {
  const text = asText(content);
  if (role === "user") return { role, content: text };
  if (role === "tool") return { role, content: "", folded: [{ name: `${called.get(id) ?? "A tool"} answered`, text }], end: "unknown" };
  if (role !== "assistant") return { role: "system", content: "", folded: [{ name: "System prompt", text }], end: "unknown" };
  const folded = (calls ?? []).map((call) => ({ name: `Called ${called.get(call.id)}`, text: call.function.arguments }));
  return { role, content: text, thought: asText(thought), thought_ms: null, report: null, end: "unknown", limit: null, folded };
}

const shortened = (name) => (name.length > MAX_NAME_CHARS ? `${name.slice(0, MAX_NAME_CHARS)}…` : name);
