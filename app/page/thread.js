// The messages of the conversation that is open, one below the other, and where the reader is in them.

import { Article } from "./article.js";
import { Backlog } from "./backlog.js";
import { counted, h, isolated, number } from "./dom.js";

const AT_ONCE = 12; // messages that are drawn before the page is shown; of the others the text stands as it was written
const NEAR_PX = 120; // so close to the end, the view follows it
const SUGGESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Tell me a short story about a lighthouse."];

const thread = document.querySelector("#thread");
const toEnd = document.querySelector("#to-end");

export class Thread {
  #articles = [];
  #origin = h("p", { class: "small muted origin", hidden: true });
  #rule = h("p", { class: "rule small muted" });
  #rest = []; // what stands after the articles
  #actions;
  #isAtEnd = true;
  #backlog = new Backlog(thread, () => this.#follow());

  /** `actions`: as of Article, and {retry, suggest}. */
  constructor(actions) {
    this.#actions = actions;
    thread.append(this.#origin);
    thread.addEventListener("scroll", () => this.#look());
    toEnd.addEventListener("click", () => {
      this.toEnd();
      document.querySelector("#message").focus();
    });
    new ResizeObserver(() => this.#isAtEnd && this.toEnd()).observe(thread); // the field below may have grown
  }

  /** Draw what has changed. `messages`: those of the path. `forked`: {title} of the conversation that this one began as, or
   * nothing. `cut`: as `cutOf` tells. `writing`: {answer, state, progress} or null. `versionsOf(message)`. `problem`:
   * {text, mayHelp} or null. What is drawn already and still the same is left alone. */
  draw({ messages, forked, cut, writing, versionsOf, problem }) {
    const follows = this.#isAtEnd;
    this.#origin.hidden = !forked;
    this.#origin.textContent = forked ? `Forked from “${isolated(forked.title)}”. The server shares what both have in common.` : "";
    let same = 0;
    while (same < messages.length && this.#articles[same] && isSame(this.#articles[same].message, messages[same])) same += 1;
    for (const gone of this.#articles.splice(same)) gone.element.remove();
    for (const part of this.#rest.splice(0)) part.remove();
    const fresh = messages.slice(same).map((message) => new Article(message, this.#actions, () => this.#follow()));
    const far = fresh.slice(0, -AT_ONCE);
    for (const article of far) article.putOff();
    this.#articles.push(...fresh);
    for (const [place, article] of this.#articles.entries()) {
      article.message = messages[place];
      this.#show(article, { messages, writing, versionsOf, problem });
    }
    if (!messages.length) this.#rest.push(this.#welcome());
    if (problem) this.#rest.push(this.#problem(problem, messages.at(-1)));
    thread.append(...fresh.map(({ element }) => element), ...this.#rest);
    this.#backlog.add(far);
    this.#drawRule(cut);
    if (follows) this.toEnd();
    else this.#look();
  }

  #drawRule(cut) {
    const below = cut && this.#articles.find(({ message }) => message === cut.message);
    if (!below) {
      this.#rule.remove();
      return;
    }
    const recalled = cut.recalled ? ` The last answer recalled ${number(cut.recalled)} of them.` : "";
    const what = below === this.#articles[0] ? "the beginning of what is below" : "what is above";
    this.#rule.textContent = `The model no longer reads ${what} (${counted(cut.tokens, "token")}).${recalled}`;
    if (below.element.previousElementSibling !== this.#rule) below.element.before(this.#rule);
  }

  /** The answer that is written has grown, or waits. */
  grow({ answer, state, progress }) {
    const article = this.#articles.at(-1);
    if (article?.message === answer) article.show({ isLast: true, isWriting: state, progress, versions: [answer], hasProblem: false });
  }

  #show(article, { messages, writing, versionsOf, problem }) {
    const { message } = article;
    article.show({
      isLast: message === messages.at(-1),
      isWriting: writing?.answer === message ? writing.state : null,
      progress: writing?.progress,
      versions: versionsOf(message),
      hasProblem: Boolean(problem),
    });
  }

  toEnd() {
    thread.scrollTop = thread.scrollHeight;
    this.#look();
  }

  toTop() {
    thread.scrollTop = 0;
    this.#look();
  }

  /** Edit the last message of one's own. Returns whether there is one. */
  editLast() {
    const article = this.#articles.findLast(({ message }) => message.role === "user");
    article?.edit();
    return Boolean(article);
  }

  /** The buttons that led to another version of a message are new: go on from there by keyboard. */
  focusVersions(message) {
    const article = this.#articles.find((other) => other.message === message);
    article?.draw();
    article?.element.querySelector(".version:enabled")?.focus();
  }

  #follow() {
    if (this.#isAtEnd) this.toEnd();
    else this.#look();
  }

  #look() {
    this.#isAtEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_PX;
    toEnd.hidden = this.#isAtEnd;
  }

  #problem({ text, mayHelp }, last) {
    const button = (name, done) => h("button", { type: "button", on: { click: done } }, name);
    const hasPart = last?.role === "assistant" && last.content;
    const help = hasPart ? [button("Continue", this.#actions.goOn), button("Answer again", this.#actions.again)] : [button("Try again", this.#actions.again)];
    return h("div", { class: "problem", role: "alert" }, h("p", {}, text), mayHelp ? help : null);
  }

  #welcome() {
    const facts = [
      ["hbm", "Every message you send makes a model read the whole conversation. Reprise keeps what it has read, so it reads only what is new."],
      ["dram", "What does not fit on the device stays in memory and on disk, and comes back while you wait for the first word."],
      ["disk", "Close the tab, restart the server, take another device: the conversation goes on after its last answer. The line under every answer says what that saved and where its history came from."],
    ];
    const suggestions = SUGGESTIONS.map((text) =>
      h("button", { type: "button", on: { click: () => this.#actions.suggest(text) } }, text));
    return h("section", { class: "welcome" },
      h("h2", {}, "A chat that does not start over"),
      h("ul", { class: "facts" }, facts.map(([source, text]) => h("li", {}, h("span", { class: "swatch", data: { source } }), h("span", {}, text)))),
      h("div", { class: "suggestions", role: "group", "aria-label": "Suggestions" }, suggestions));
  }
}

function isSame(one, other) {
  return one === other || JSON.stringify(one) === JSON.stringify(other);
}
