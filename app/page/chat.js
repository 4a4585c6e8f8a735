// One conversation: its thread, its composer, and the answer that is being streamed.

import { ApiError, chat } from "./api.js";
import { copyButton, h, icon, milliseconds } from "./dom.js";
import { render } from "./markdown.js";
import { inWords, strip, tokensOf } from "./provenance.js";
import * as store from "./store.js";

const RENDER_MS = 60; // between two looks at a text that grows
const REFUSED = new Set([400, 413, 422]); // however often it is sent
const SUGGESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Tell me a short story about a lighthouse."];

const thread = document.querySelector("#thread");
const announcement = document.querySelector("#announce");

/** Events: `change` after every message, `error` with an ApiError the page has to act upon, `refused` with the text of a
 * message that the server will never take. */
export class Chat extends EventTarget {
  #abort = null;
  #conversation = store.create();
  #early = new Map(); // request id -> tokens: an answer that is stopped gets no report of its own
  #refusal = null; // why the last message went back to the composer
  model = null;
  sampling = null; // what the model is drawn with where a request says nothing

  get conversation() {
    return this.#conversation;
  }

  get streaming() {
    return this.#abort !== null;
  }

  open(conversation) {
    this.stop();
    this.#abort = null; // what is left of a stopped answer ends by itself, in its own conversation
    this.#conversation = conversation;
    this.#refusal = null;
    this.#draw();
    thread.scrollTop = conversation.messages.length ? thread.scrollHeight : 0; // a welcome is read from its top
  }

  stop() {
    this.#abort?.abort();
  }

  /** What the live view heard of an answer's first token. */
  hear(turn) {
    this.#early.set(turn.request_id, turn);
    if (this.#early.size > 64) this.#early.delete(this.#early.keys().next().value);
  }

  /** Another tab has gone on with it. */
  replace(conversation) {
    this.#conversation = conversation;
    this.#refusal = null;
    this.#draw();
  }

  async send(text) {
    if (this.streaming) return;
    this.#conversation.messages.push({ role: "user", content: text });
    await this.#answer();
  }

  /** The last answer once more: it forks where the question ends, and everything before stays cached. */
  async again() {
    if (this.streaming) return;
    if (this.#conversation.messages.at(-1)?.role === "assistant") this.#conversation.messages.pop();
    await this.#answer();
  }

  async #answer() {
    const conversation = this.#conversation;
    const history = conversation.messages.map(({ role, content }) => ({ role, content }));
    const answer = { role: "assistant", content: "", report: null, stopped: false };
    const abort = new AbortController();
    this.#abort = abort;
    this.#refusal = null;
    conversation.messages.push(answer);
    this.#draw();
    this.#changed(conversation);
    const shown = new Streamed(thread.querySelector(".message:last-of-type .text"));
    let failure = null;
    let requestId = null;
    try {
      for await (const chunk of chat(this.#body(conversation, history), abort.signal)) {
        requestId = chunk.id;
        answer.content += chunk.choices[0]?.delta.content ?? "";
        shown.show(answer.content);
        if (chunk.x_cache) answer.report = reportOf(chunk);
      }
    } catch (error) {
      answer.stopped = abort.signal.aborted;
      if (!answer.stopped) failure = error instanceof ApiError ? error : new ApiError(0, "The connection to the server was lost.", "connection", null);
    }
    if (this.#abort === abort) this.#abort = null;
    const early = this.#early.get(requestId);
    if (!answer.report && early) answer.report = { tokens: tokensOf(early), ttft_ms: early.ttft_ms };
    if (!answer.content && (failure || answer.stopped)) conversation.messages.splice(conversation.messages.indexOf(answer), 1);
    const refused = failure !== null && REFUSED.has(failure.status) && !answer.content;
    const question = refused ? conversation.messages.pop().content : null; // else it would spoil all that is said later
    if (failure && !refused) conversation.problem = failure.message;
    else delete conversation.problem;
    this.#changed(conversation);
    if (conversation === this.#conversation) {
      this.#refusal = refused ? failure.message : null;
      this.#draw();
      if (refused) this.dispatchEvent(new CustomEvent("refused", { detail: question }));
    }
    if (failure) this.dispatchEvent(new CustomEvent("error", { detail: failure }));
    else announce(answer);
  }

  #body(conversation, history) {
    const { system, ...sampling } = conversation.options;
    const messages = system.trim() ? [{ role: "system", content: system }, ...history] : history;
    const given = Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== null));
    return { model: this.model, messages, session_id: conversation.id, ...given };
  }

  #changed(conversation) {
    let saved = "kept";
    if (conversation.messages.length) saved = store.save(conversation);
    else {
      store.remove(conversation.id);
      Object.assign(conversation, { title: "", revision: 0 });
    }
    this.dispatchEvent(new CustomEvent("change", { detail: { saved } }));
  }

  #draw() {
    const { messages, problem } = this.#conversation;
    const near = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 120;
    const nodes = messages.map((message, index) => this.#message(message, index === messages.length - 1));
    if (!nodes.length) nodes.push(this.#welcome());
    if (problem && !this.streaming) nodes.push(this.#problem(problem, true));
    else if (this.#refusal) nodes.push(this.#problem(this.#refusal, false));
    thread.replaceChildren(...nodes);
    if (near) thread.scrollTop = thread.scrollHeight;
  }

  #message(message, isLast) {
    const mine = message.role === "user";
    const streaming = isLast && !mine && this.streaming;
    const text = h("div", { class: "text" });
    if (mine) text.textContent = message.content;
    else text.append(render(message.content));
    const label = h("h2", { class: "visually-hidden" }, mine ? "You" : "Answer");
    const article = h("article", { class: `message ${mine ? "mine" : "theirs"}`, data: { streaming } }, label, text);
    if (mine || streaming) return article;
    if (message.stopped) article.append(h("p", { class: "small muted" }, "Stopped."));
    if (message.report) article.append(strip(message.report));
    const actions = h("div", { class: "message-actions" }, copyButton("Copy this answer", "icon-button small", () => message.content));
    if (isLast) {
      const again = icon(h("button", { type: "button", class: "icon-button small", "aria-label": "Answer again", title: "Answer again" }), "again");
      again.addEventListener("click", () => this.again());
      actions.append(again);
    }
    article.append(actions);
    return article;
  }

  #problem(message, mayHelp) {
    const retry = h("button", { type: "button", on: { click: () => this.again() } }, "Try again");
    return h("div", { class: "problem", role: "alert" }, h("p", {}, message), mayHelp ? retry : null);
  }

  #welcome() {
    const facts = [
      ["hbm", "Every message you send makes a model read the whole conversation. Reprise keeps what it has read, so it reads only what is new."],
      ["dram", "What does not fit on the device stays in memory and on disk, and comes back while you wait for the first word."],
      ["disk", "Close the tab, restart the server: the conversation goes on where it was. The bar under every answer shows where its history came from."],
    ];
    const suggestions = SUGGESTIONS.map((text) =>
      h("button", { type: "button", on: { click: () => this.send(text) } }, text));
    return h("section", { class: "welcome" },
      h("h2", {}, "A chat that does not start over"),
      h("ul", { class: "facts" }, facts.map(([source, text]) => h("li", {}, h("span", { class: "swatch", data: { source } }), h("span", {}, text)))),
      h("div", { class: "suggestions", role: "group", "aria-label": "Suggestions" }, suggestions));
  }
}

function reportOf(chunk) {
  return {
    tokens: tokensOf(chunk.x_cache),
    reasons: chunk.x_cache.miss_reasons,
    diverged: chunk.x_cache.diverged_at,
    ttft_ms: chunk.timings?.ttft_ms ?? null,
    timings: chunk.timings,
    completion_tokens: chunk.usage?.completion_tokens,
  };
}

/** A screen reader hears of an answer once, when it is there, not token by token. */
function announce(answer) {
  if (!answer.content) return;
  const { report } = answer;
  const cost = report ? ` First token after ${milliseconds(report.ttft_ms)}; ${inWords(report.tokens)}.` : "";
  announcement.textContent = `${answer.stopped ? "Answer stopped." : "Answer complete."}${cost}`;
}

/** A growing text, rendered anew now and then: a token may turn what stood before it into a list or a link. */
class Streamed {
  #element;
  #text = "";
  #due = null;

  constructor(element) {
    this.#element = element;
  }

  show(text) {
    this.#text = text;
    this.#due ??= setTimeout(() => {
      this.#due = null;
      if (!this.#element.isConnected) return;
      const near = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 120;
      this.#element.replaceChildren(render(this.#text));
      if (near) thread.scrollTop = thread.scrollHeight;
    }, RENDER_MS + this.#text.length / 100);
  }
}
