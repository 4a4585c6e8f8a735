// The AI SDK, two turns with calls. Arguments: provider, URL, model, JSON of [system, first, second]. Prints both texts.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [provider, url, name, given] = process.argv.slice(2);
const [system, first, second] = JSON.parse(given);
const of = { baseURL: `${url}/v1`, apiKey: "none" };
const model = {
  compatible: () => createOpenAICompatible({ name: "reprise", ...of })(name),
  openai: () => createOpenAI(of)(name), // Responses, whose stored items it refers to
  anthropic: () => createAnthropic(of)(name),
}[provider]();
const weather = tool({
  description: "Get the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is 21 degrees and clear in ${city}.`,
});
const options = { model, system, tools: { weather }, stopWhen: stepCountIs(8), maxRetries: 0 };

const messages = [{ role: "user", content: first }];
const answer = await generateText({ ...options, messages });
messages.push(...answer.response.messages, { role: "user", content: second });
const stream = streamText({ ...options, messages });
for await (const _ of stream.textStream); // the texts of all steps; `text` is that of the last one
console.log(JSON.stringify([answer.text, await stream.text]));
