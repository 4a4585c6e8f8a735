// One conversation: what is said in it, and the answer that is being written.

import { ApiError } from "./api.js";
import { followAnswer } from "./answer_stream.js";
import * as tree from "./message_tree.js";
import { inWords, tokensOf } from "./provenance.js";
import { waitInWords } from "./reading.js";
import * as store from "./store.js";
import { Thread } from "./thread.js";
import { charsOf, cutOf, drawMeter } from "./window.js";
import { isWrittenElsewhere, replyWith } from "./writers.js";

const KEEP_MS = 1000; // between two looks at an answer that grows, by which it is kept should the tab be closed
const MAX_RUNNING = 3; // answers at once: each holds one of the six connections that a browser has to a server
const REFUSED = new Set([400, 413, 422]); // however often it is sent
const CHARS_PER_TOKEN = 4; // in English, about
const READ_ONLY = "A program that calls tools has this conversation. It can be read here, but only the program can go on with it.";
const ANOTHER_TAB = "Another tab writes an answer in this conversation. Go on when it is there, or stop it in that tab.";

const announcement = document.querySelector("#announce");

/** Events: `change` after every message, `error` with an ApiError the page has to act upon, `refused` with the text of a
 * message that was not taken and its conversation, `suggest` with a text, `fork` with a message. */
export class Chat extends EventTarget {
  #conversation = store.create();
  // {conversation, answer, abort, state, progress, idle_ms, done} of each answer that is written, the oldest first. idle_ms: for
  // how long nothing had been said before.
  #running = [];
  #elsewhere = null; // the answer of this conversation that another tab writes
  #early = new Map(); // request id -> tokens: an answer that is stopped gets no report of its own
  #refusal = null; // why the last message went back to the composer
  #thread = new Thread({
    again: () => this.again(),
    goOn: () => this.goOn(),
    edit: (message, text) => this.edit(message, text),
    fork: (message) => this.#tell("fork", message),
    choose: (message) => this.#choose(message),
    isBusy: () => this.streaming,
    isReadOnly: () => Boolean(this.#conversation.isReadOnly),
    suggest: (text) => this.#tell("suggest", text),
  });
  placeOf = () => null; // where what was read of a conversation lies, by its id
  join = async () => false; // as of Joined
  model = null;
  window = null; // the model's, in tokens
  sampling = null; // what the model is drawn with where a request says nothing

  get conversation() {
    return this.#conversation;
  }

  get #writing() {
    return this.#runningIn(this.#conversation.id);
  }

  #runningIn(id) {
    return this.#running.find(({ conversation }) => conversation.id === id) ?? null;
  }

  /** Whether an answer of the conversation that is open is written here. */
  get streaming() {
    return this.#writing !== null;
  }

  constructor() {
    super();
    replyWith((id) => this.#runningIn(id) !== null);
  }

  /** Show a conversation. An answer that is written in another one goes on. */
  open(conversation) {
    this.#conversation = this.#runningIn(conversation.id)?.conversation ?? conversation;
    this.#refusal = null;
    this.#draw();
    if (this.#conversation.messages.length) this.#thread.toEnd();
    else this.#thread.toTop(); // a welcome is read from its top
    this.#lookElsewhere();
  }

  /** End the answer that is written in a conversation, if there is one. Resolves when what had come of it is kept. */
  async stop(id = this.#conversation.id) {
    const writing = this.#runningIn(id);
    writing?.abort.abort();
    await writing?.done;
  }

  /** An answer without an end has been broken off, or another tab writes it. */
  async #lookElsewhere() {
    const conversation = this.#conversation;
    const last = tree.path(conversation).at(-1);
    this.#elsewhere = null;
    if (this.streaming || last?.role !== "assistant" || last.end !== null) return;
    if (!(await isWrittenElsewhere(conversation.id)) || conversation !== this.#conversation) return;
    this.#elsewhere = last;
    this.#draw();
  }

  /** What the live view heard of an answer's first token. */
  hear(turn) {
    this.#early.set(turn.request_id, turn);
    if (this.#early.size > 64) this.#early.delete(this.#early.keys().next().value);
  }

  /** Another model is served, or one at last. `window`: its, in tokens. */
  serve({ id, default_sampling: sampling, max_model_len: window }) {
    Object.assign(this, { model: id, sampling, window });
    drawMeter(tree.path(this.#conversation), window);
  }

  /** Another tab has gone on with it. */
  replace(conversation) {
    this.#conversation = conversation;
    this.#refusal = null;
    this.#draw();
    this.#lookElsewhere();
  }

  async send(text) {
    await this.#goOnWith(text, (conversation) => {
      dropEmpty(conversation);
      return this.#ask(tree.add(conversation, conversation.head, { role: "user", content: text }));
    });
  }

  /** Say something else in the place of a message. What was said there before stays as another version. */
  async edit(message, text) {
    await this.#goOnWith(text, (conversation) => this.#ask(tree.add(conversation, message.parent, { role: "user", content: text })));
  }

  /** Answer the last question once more, beside the answer that there is: everything before stays cached. */
  async again() {
    await this.#goOnWith(null, (conversation) => {
      const question = tree.path(conversation).findLast(({ role }) => role === "user");
      dropEmpty(conversation);
      return this.#write(this.#newAnswer(question), null);
    });
  }

  /** Let the last answer go on where it ended. */
  async goOn() {
    await this.#goOnWith(null, async (conversation) => {
      const last = tree.path(conversation).at(-1);
      if (last?.role === "assistant") await this.#write(last, null);
    });
  }

  /** `work(conversation)` on the one that is open, unless an answer is written in it. If another tab writes it or it can only
   * be read, that is said, and `text`, what was to be sent or null, goes back to the composer. */
  async #goOnWith(text, work) {
    if (this.streaming) return;
    const conversation = this.#conversation;
    const written = [tree.path(conversation).at(-1), conversation.messages.at(-1)].some(isUnfinished);
    const why = conversation.isReadOnly ? READ_ONLY : written && (await isWrittenElsewhere(conversation.id)) ? ANOTHER_TAB : null;
    const isOpen = conversation.id === this.#conversation.id && !this.streaming; // else another one was opened meanwhile
    if (!why && isOpen) return work(this.#conversation);
    if (isOpen) {
      this.#refusal = why;
      this.#draw();
      this.#thread.toEnd();
    }
    if (text !== null) this.#tell("refused", { text, conversation });
  }

  /** The ids of the conversations in which an answer is written here. */
  get running() {
    return this.#running.map(({ conversation }) => conversation.id);
  }

  editLast() {
    return !this.streaming && !this.#conversation.isReadOnly && this.#thread.editLast();
  }

  #choose(message) {
    return this.#goOnWith(null, (conversation) => {
      tree.choose(conversation, message);
      delete conversation.problem;
      this.#refusal = null;
      this.#draw();
      this.#thread.focusVersions(message);
      return this.#keep(conversation);
    });
  }

  async #ask(question) {
    await this.#write(this.#newAnswer(question), question);
  }

  #newAnswer(question) {
    return tree.add(this.#conversation, question.id, { role: "assistant", content: "", thought: "", thought_ms: null, report: null, end: null, limit: null });
  }

  /** Fill an answer, or what is missing of it. `question`: the message that was just written, which goes back to the
   * composer if the server will never take it; else null. */
  #write(answer, question) {
    const conversation = this.#conversation;
    const writing = { conversation, answer, abort: new AbortController(), state: "growing", idle_ms: Date.now() - conversation.updated };
    Object.assign(answer, { end: null, limit: conversation.options.max_tokens });
    delete conversation.problem;
    this.#refusal = null;
    this.#elsewhere = null;
    if (this.#running.length === MAX_RUNNING) this.#running[0].abort.abort();
    this.#running.push(writing);
    this.#draw();
    this.#thread.toEnd();
    this.#keep(conversation);
    writing.done = this.#follow(writing, question);
    return writing.done;
  }

  async #follow(writing, question) {
    const { conversation, answer, abort } = writing;
    const { report: reportBefore } = answer;
    let charsBefore = 0;
    const ask = () => {
      charsBefore = charsOf(answer);
      return this.#body(conversation, answer);
    };
    let failure = null;
    let keptAt = Date.now();
    const told = (state, progress = null) => {
      if (state === "waiting" && conversation === this.#conversation) announcement.textContent = "The server is away. The answer goes on when it is back.";
      if (progress && !writing.progress && conversation === this.#conversation) announcement.textContent = waitInWords(progress, null, 0) ?? "";
      Object.assign(writing, { state, progress: progress && { told: progress, place: this.placeOf(conversation.id), since: performance.now() } });
      if (conversation === this.#conversation) this.#thread.grow(writing);
      if (state !== "growing" || Date.now() < keptAt + KEEP_MS) return;
      keptAt = Date.now();
      store.saveProgress(conversation);
    };
    try {
      await this.#join(writing, question);
      await followAnswer(answer, ask, { signal: abort.signal, told });
    } catch (error) {
      if (abort.signal.aborted) answer.end = "stopped";
      else failure = error instanceof ApiError ? error : new ApiError(0, "The connection to the server was lost.", "connection", null);
    }
    this.#running = this.#running.filter((other) => other !== writing);
    const early = this.#early.get(answer.request_id);
    if (answer.report === reportBefore && early) {
      const guessed = Math.round((charsOf(answer) - charsBefore) / CHARS_PER_TOKEN);
      answer.report = { tokens: tokensOf(early), ttft_ms: early.ttft_ms, saved_ms: early.saved_ms ?? null, guessed_tokens: guessed, recalled: reportBefore?.recalled ?? 0 };
    }
    if (answer.report) Object.assign(answer.report, { idle_ms: writing.idle_ms, begun_chars: charsBefore });
    delete answer.request_id;
    const refused = failure !== null && question !== null && (REFUSED.has(failure.status) || failure.code === "elsewhere") && !answer.content;
    if ((failure || answer.end === "stopped") && !answer.content && !answer.thought) dropUnsaid(conversation, answer);
    if (refused) this.#takeBack(conversation, question); // else it would spoil all that is said later
    else if (failure) conversation.problem = failure.sentence;
    else if (answer.end === "stopped" && !answer.content && !answer.thought) conversation.problem = "Stopped before the first word.";
    if (conversation === this.#conversation) {
      this.#refusal = refused ? failure.sentence : null;
      this.#draw();
    }
    if (refused) {
      this.#tell("refused", { text: question.content, conversation });
      if (conversation === this.#conversation) this.#thread.toEnd();
    }
    await this.#keep(conversation);
    if (failure) this.#tell("error", failure);
    else if (conversation === this.#conversation) announce(answer);
  }

  /** Another device may have gone on with a conversation: a turn that does not know of it would write over it in the server. */
  async #join({ conversation, answer, abort }, question) {
    const mayHaveGoneOn = conversation.messages.some(({ role, content }) => role === "assistant" && content);
    if (!mayHaveGoneOn || !(await this.join(conversation, answer, question, abort.signal))) return;
    if (conversation === this.#conversation) this.#draw();
  }

  #takeBack(conversation, question) {
    tree.drop(conversation, question);
    const before = tree.versions(conversation, question).at(-1);
    if (before) tree.choose(conversation, before);
  }

  /** The request for an answer, or for the rest of one of which a part is there. */
  #body(conversation, answer) {
    const { system, ...sampling } = conversation.options;
    const said = tree.path({ ...conversation, head: answer.parent }).filter(({ role, content }) => role === "user" || content);
    const messages = said.map(asSent);
    if (system.trim()) messages.unshift({ role: "system", content: system });
    const given = Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== null));
    const body = { model: this.model, messages, session_id: conversation.id, ...given };
    if (!answer.content) return body;
    messages.push(asSent(answer));
    body.continue_final_message = true;
    if (answer.thought) body.thinking = { type: "disabled" }; // it has thought to the end
    return body;
  }

  async #keep(conversation) {
    this.#tell("change", { saved: "kept", id: conversation.id });
    let saved = "kept";
    if (conversation.messages.length) saved = await store.save(conversation);
    else {
      await store.remove(conversation.id);
      Object.assign(conversation, { title: "", revision: 0 });
    }
    this.#tell("change", { saved, id: conversation.id });
  }

  #draw() {
    const conversation = this.#conversation;
    const { problem } = conversation;
    const messages = tree.path(conversation);
    drawMeter(messages, this.window);
    this.#thread.draw({
      messages,
      cut: cutOf(messages),
      forked: conversation.forked,
      writing: this.#writing ?? (this.#elsewhere && { answer: this.#elsewhere, state: "elsewhere" }),
      versionsOf: tree.versionsIn(conversation),
      problem: this.#refusal ? { text: this.#refusal, mayHelp: false } : problem && !this.streaming ? { text: problem, mayHelp: true } : null,
    });
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

const isUnfinished = (message) => message?.role === "assistant" && message.end === null;

/** Take an answer away that was broken off before its first word: it says nothing once something else is said after it. */
function dropEmpty(conversation) {
  const last = tree.path(conversation).at(-1);
  if (isUnfinished(last) && !last.content && !last.thought) dropUnsaid(conversation, last);
}

/** Take an answer out that says nothing. Another version of it, which it was to stand beside, is shown again. */
function dropUnsaid(conversation, answer) {
  tree.drop(conversation, answer);
  const other = tree.versions(conversation, answer).at(-1);
  if (other && conversation.head === answer.parent) conversation.head = other.id;
}

function asSent({ role, content, thought }) {
  return thought ? { role, content, reasoning_content: thought } : { role, content };
}

/** A screen reader hears of an answer once, when it is there, not token by token. */
function announce(answer) {
  if (!answer.content) return;
  const { report } = answer;
  const cost = report ? ` ${inWords(report)}.` : "";
  const end = { stopped: "Answer stopped.", length: "Answer ended at its limit." }[answer.end] ?? "Answer complete.";
  announcement.textContent = `${end}${cost}`;
}
