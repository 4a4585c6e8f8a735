// The official Node client. Arguments: base URL, key, model. Exits 0 if all is as it should be.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello! Do you like music?" }];

const plain = await client.chat.completions.create({ model, messages, max_tokens: 20, seed: 1 });
let said = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 20, seed: 1, stream: true });
for await (const chunk of stream) said += chunk.choices[0]?.delta?.content ?? "";
assert.equal(said, plain.choices[0].message.content);
assert.ok(plain.usage.prompt_tokens_details.cached_tokens >= 0);

const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters, strict: true } }];
const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 200 });
const called = await runner.finalChatCompletion();
assert.equal(typeof JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "string");

const format = { type: "json_schema", json_schema: { name: "city", schema: parameters, strict: true } };
const formatted = await client.chat.completions.create({ model, messages, response_format: format, max_tokens: 100 });
assert.deepEqual(Object.keys(JSON.parse(formatted.choices[0].message.content)), ["city"]);

const first = await client.responses.create({ model, input: "Hello!", max_output_tokens: 20 });
const events = await client.responses.create({
  model, input: "And you?", previous_response_id: first.id, max_output_tokens: 20, stream: true,
});
let last;
for await (const event of events) last = event;
assert.ok(["response.completed", "response.incomplete"].includes(last.type));
assert.ok(last.response.usage.input_tokens_details.cached_tokens > 0);

const left = await client.chat.completions.create({ model, messages, max_tokens: 300, stream: true });
for await (const _ of left) break; // leaves in the middle
await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
