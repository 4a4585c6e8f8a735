// One message on the page: its text, what the model thought before it, how it ended, and what can be done with it.

import { copyButton, counted, h, icon, isolated, number, withUnit } from "./dom.js";
import { GrowingText } from "./growing_text.js";
import { strip } from "./provenance.js";
import { Reading } from "./reading.js";

const WRITING = {
  reading: "",
  growing: "",
  waiting: "The server is away. The answer goes on when it is back.",
  elsewhere: "Another tab writes this answer.",
};

const NAMES = { user: "You", assistant: "Answer", tool: "Answer of a tool", system: "System prompt" };

/** `actions`: {again, goOn, edit, fork, choose}, each called with a message or a version of it, `isBusy()`: whether an
 * answer is written, so that nothing else can be asked, and `isReadOnly()`: whether nothing ever can. `grown()` is called
 * when the text has become longer on the page. */
export class Article {
  element;
  message;
  #actions;
  #text = h("div", { class: "text", dir: "auto" });
  #growing;
  #reading = new Reading();
  #shownChars = null; // of an answer that is whole; null: it stands as it was written
  #putOff = null; // what `show` was told last, while that is not drawn
  #thought = null; // {details, summary, text, shown}
  #ending = h("div", { class: "ending", hidden: true });
  #strip = null; // {report, element}
  #buttons = h("div", { class: "message-actions", hidden: true });
  #state = "";

  constructor(message, actions, grown) {
    this.message = message;
    this.#actions = actions;
    this.#growing = new GrowingText(this.#text, () => this.element.isConnected && grown());
    const mine = message.role === "user";
    this.#text.textContent = message.content;
    this.#text.classList.toggle("plain", !mine);
    const label = h("h2", { class: "visually-hidden" }, NAMES[message.role]);
    this.element = h("article", { class: `message ${mine ? "mine" : "theirs"}`, data: { id: message.id } }, label, this.#text, this.#reading.element, (message.folded ?? []).map(folded), this.#ending, this.#buttons);
    if (message.thought) this.#drawThought(false);
  }

  /** Until `draw` is called, let the text stand as it was written, so that it can be found, and nothing beside it. */
  putOff() {
    this.#putOff = {};
    this.element.classList.add("far");
  }

  /** Draw what was put off. The element is on the page. */
  draw() {
    const told = this.#putOff;
    this.#putOff = null;
    if (this.message.role === "assistant" && this.#shownChars === null) this.#drawWhole();
    if (told?.versions) this.show(told);
  }

  /** Draw what has changed. `isWriting`: "reading", "growing", "waiting" or "elsewhere" while the answer is written, else
   * null. `progress`: of its prompt while that is read, see `Reading`. `versions`: all
   * messages in this one's place. `hasProblem`: that it did not end well is said below the thread. */
  show(told) {
    const { isLast, isWriting, progress = null, versions, hasProblem } = told;
    const { message } = this;
    if (this.#putOff && !isWriting && !isLast) {
      this.#putOff = told;
      return;
    }
    this.#putOff = null;
    this.element.dataset.streaming = String(Boolean(isWriting));
    this.#reading.show(isWriting === "reading" ? progress : null);
    if (message.role === "assistant") {
      if (isWriting) this.#grow();
      else if (this.#shownChars !== message.content.length) this.#drawWhole();
      if (message.thought || this.#thought) this.#drawThought(Boolean(isWriting) && !message.content);
    }
    const state = [isLast, isWriting, hasProblem && isLast, message.end, message.limit, Boolean(message.content), versions.map(({ id }) => id)];
    if (this.#state === JSON.stringify(state) && (this.#strip?.report ?? null) === (message.report ?? null)) return;
    this.#state = JSON.stringify(state);
    this.#drawEnding(isLast, isWriting, hasProblem);
    this.#drawStrip(isWriting);
    this.#drawButtons(isLast, isWriting, versions);
  }

  /** Let the text be changed in its place. */
  edit() {
    if (this.element.querySelector("form") || this.#actions.isBusy()) return;
    const field = h("textarea", { value: this.message.content, rows: Math.min(12, this.message.content.split("\n").length + 1), dir: "auto", "aria-label": "Edit the message" });
    const close = () => {
      form.remove();
      this.#text.hidden = this.#buttons.hidden = false;
      this.element.querySelector(".edit")?.focus();
    };
    const done = (event) => {
      event.preventDefault();
      if (this.#actions.isBusy()) return;
      const text = field.value.trim();
      close();
      if (text && text !== this.message.content) this.#actions.edit(this.message, text);
    };
    const form = h("form", { class: "edit-form", on: { submit: done } }, field,
      h("div", { class: "actions" },
        h("button", { type: "button", on: { click: close } }, "Cancel"),
        h("button", { type: "submit", class: "primary" }, "Send")));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) done(event);
    });
    this.#text.hidden = this.#buttons.hidden = true;
    this.#text.after(form);
    field.focus();
  }

  #grow() {
    if (this.#shownChars === null) this.#drawWhole();
    this.#growing.show(this.message.content);
    this.#shownChars = -1; // to be drawn as a whole once it is
  }

  #drawWhole() {
    if (this.#shownChars === null) {
      this.#text.replaceChildren();
      this.#text.classList.remove("plain");
    }
    this.#growing.show(this.message.content);
    this.#growing.finish();
    this.#shownChars = this.message.content.length;
  }

  /** Folded unless the reader opens it. It grows only while it is open. */
  #drawThought(isThinking) {
    const { message } = this;
    if (!message.thought) {
      this.#thought.details.remove();
      this.#thought = null;
      return;
    }
    if (!this.#thought) {
      const summary = h("summary");
      const text = h("div", { class: "thought-text", dir: "auto", tabIndex: 0, role: "region", "aria-label": "Thought" });
      const details = h("details", { class: "thought" }, summary, text);
      details.addEventListener("toggle", () => details.open && this.#fillThought());
      this.#thought = { details, summary, text };
      this.#text.before(details);
    }
    const took = (message.thought_ms ?? null) === null ? "" : seconds(message.thought_ms); // not known of one that was fetched
    const words = isThinking ? `Thinking, for ${took}` : took ? `Thought for ${took}` : "Thought";
    if (this.#thought.summary.textContent !== words) this.#thought.summary.textContent = words;
    if (this.#thought.details.open) this.#fillThought();
  }

  #fillThought() {
    const shown = this.#thought.text;
    const { thought } = this.message;
    if (shown.firstChild && thought.startsWith(shown.textContent)) shown.firstChild.appendData(thought.slice(shown.textContent.length));
    else shown.textContent = thought;
  }

  #drawEnding(isLast, isWriting, hasProblem) {
    const { message } = this;
    this.#ending.replaceChildren();
    this.#ending.hidden = true;
    if (message.role === "user" || (hasProblem && isLast)) return;
    const words = isWriting ? WRITING[isWriting] : endOf(message);
    const mayGoOn = isLast && !isWriting && !this.#actions.isReadOnly();
    if (!words && !(mayGoOn && message.end === "unknown")) return; // the server does not say how one ended: it may be a part
    this.#ending.hidden = false;
    this.#ending.append(...(words ? [h("p", {}, words)] : []), ...(mayGoOn ? this.#goOnButtons() : []));
  }

  #goOnButtons() {
    const goOn = h("button", { type: "button", on: { click: () => this.#actions.goOn() } }, "Continue");
    const again = h("button", { type: "button", on: { click: () => this.#actions.again() } }, "Answer again");
    return this.message.content ? [goOn, again] : [again];
  }

  #drawStrip(isWriting) {
    const { report } = this.message;
    const shown = isWriting ? null : report;
    if ((this.#strip?.report ?? null) === (shown ?? null)) return;
    this.#strip?.element.remove();
    this.#strip = shown ? { report: shown, element: strip(shown) } : null;
    if (shown) this.#buttons.before(this.#strip.element);
  }

  #drawButtons(isLast, isWriting, versions) {
    const { message } = this;
    const mine = message.role === "user";
    const isReadOnly = this.#actions.isReadOnly();
    this.#buttons.hidden = Boolean(isWriting) || (isReadOnly && !message.content);
    const said = mine ? "message" : "answer";
    const button = (name, picture, className, done) =>
      icon(h("button", { type: "button", class: `icon-button small ${className}`, "aria-label": name, title: name, on: { click: done } }), picture);
    const parts = [];
    if (versions.length > 1) {
      const place = versions.findIndex(({ id }) => id === message.id);
      const turn = (step, name, picture) => {
        const to = versions[place + step];
        const made = button(name, picture, "version", () => this.#actions.choose(to));
        made.disabled = !to;
        return made;
      };
      parts.push(h("span", { class: "versions", role: "group", "aria-label": `Versions of this ${said}` },
        turn(-1, "Version before", "before"),
        h("span", { class: "small muted" }, `${number(place + 1)}/${number(versions.length)}`),
        turn(1, "Next version", "after")));
    }
    if (mine && !isReadOnly) parts.push(button("Edit this message", "edit", "edit", () => this.edit()));
    parts.push(copyButton(`Copy this ${said}`, "icon-button small", () => this.message.content));
    if (!mine && isLast && this.#ending.hidden && !isReadOnly) parts.push(button("Answer again", "again", "", () => this.#actions.again()));
    if (!mine && !isReadOnly) parts.push(button("Fork from here", "fork", "", () => this.#actions.fork(this.message)));
    this.#buttons.replaceChildren(...parts);
  }
}

/** A text beside what was said: a call of a tool, or its result. */
function folded({ name, text }) {
  const shown = h("div", { class: "thought-text", dir: "auto", tabIndex: 0, role: "region", "aria-label": name });
  const details = h("details", { class: "thought" }, h("summary", {}, isolated(name)), shown);
  details.addEventListener("toggle", () => { shown.textContent = text; }, { once: true });
  return details;
}

function seconds(ms) {
  const all = Math.max(1, Math.round(ms / 1000));
  return all < 120 ? withUnit(all, "s") : `${withUnit(Math.floor(all / 60), "min")} ${withUnit(all % 60, "s")}`;
}

/** How an answer ended, where that is not its own end. */
function endOf({ end, limit, content, thought, folded: beside }) {
  const where = !content && thought ? ", before it had thought to the end" : "";
  if (end === "length") return limit ? `Ended at its limit of ${counted(limit, "token")}${where}.` : `Ended where the model's window is full${where}.`;
  if (end === "stopped") return `Stopped${where}.`;
  if (end === null) return `Broken off${where}.`;
  return content || beside?.length ? "" : "The answer is empty.";
}
