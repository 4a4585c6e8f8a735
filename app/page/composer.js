// The field in which a message is written, its draft, and its buttons.

import { NARROW } from "./panels.js";

const DRAFT = "reprise.draft.";
const NEW = "new"; // the draft of a conversation that has not begun
const MAX_DRAFT_CHARS = 2_000_000; // of the five million that localStorage has; a longer one is gone with the tab
const LONG_DRAFT_CHARS = 100_000; // a longer one is kept when the typing pauses
const PAUSE_MS = 1000;
const MAX_HEIGHT_PX = 220;
const COMPOSING = 229; // the key code of an Enter that ends a composition in Safari, which says isComposing no more

const element = (id) => document.querySelector(`#${id}`);
const message = element("message");
const unkept = new Map(); // key -> a draft that localStorage has no room for

/** Events: `send` with a text, `stop`, `typing`, `previous` when the last message is to be edited, `files` when some were
 * pasted or dropped that are no text. */
export class Composer extends EventTarget {
  #key = NEW;
  #streaming = false;
  #isReady = false;
  #timer = null; // until a long draft is kept
  #queued = false; // whether the text is sent as soon as the model is there

  constructor() {
    super();
    message.addEventListener("input", () => {
      this.#changed();
      this.dispatchEvent(new Event("typing"));
    });
    message.addEventListener("focus", () => this.dispatchEvent(new Event("typing")));
    message.addEventListener("keydown", (event) => this.#press(event));
    message.addEventListener("paste", (event) => this.#refuseFiles(event.clipboardData, event));
    message.addEventListener("drop", (event) => this.#refuseFiles(event.dataTransfer, event));
    element("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    addEventListener("pagehide", () => this.#keepNow());
    element("stop").addEventListener("click", () => this.dispatchEvent(new Event("stop")));
    element("unqueue").addEventListener("click", () => this.unqueue());
  }

  /** The conversation that is open has another draft. */
  open(conversation) {
    const key = keyOf(conversation);
    if (key === this.#key && message.value) return;
    this.unqueue();
    this.#keepNow();
    this.#key = key;
    message.value = draftOf(key);
    fit();
  }

  /** The conversation that is open is gone: what is written begins the next one. */
  moveOn() {
    const text = message.value;
    this.#keepNow();
    message.value = "";
    forget(this.#key);
    if (text.trim()) this.giveBack(text, { messages: [] });
  }

  /** The conversation that is open has begun, or was kept under another id: what is written belongs to it. */
  follow(conversation) {
    const key = keyOf(conversation);
    if (key === this.#key) return;
    this.#keepNow();
    forget(this.#key);
    this.#key = key;
    keep(key, message.value);
  }

  /** Put a text into the field of a conversation, before what is there. */
  giveBack(text, conversation) {
    const key = conversation.id === this.#key ? this.#key : keyOf(conversation);
    const there = key === this.#key ? message.value : draftOf(key);
    const whole = there.trim() ? `${text}\n${there}` : text;
    keep(key, whole);
    if (key !== this.#key) return;
    message.value = whole;
    fit();
  }

  /** Send a text as if it had been typed. */
  suggest(text) {
    message.value = text;
    this.#changed();
    this.#submit();
  }

  set streaming(value) {
    const changes = value !== this.#streaming;
    this.#streaming = value;
    const hadFocus = [element("stop"), element("send"), document.body].includes(document.activeElement);
    element("send").hidden = value;
    element("stop").hidden = !value;
    if (changes && hadFocus) (value ? element("stop") : NARROW.matches ? element("send") : message).focus(); // a field brings a phone's keyboard
  }

  /** The model takes requests from now on. */
  ready() {
    this.#isReady = true;
    if (this.#queued) this.#submit();
  }

  get isQueued() {
    return this.#queued;
  }

  unqueue() {
    this.#queue(false);
  }

  focus() {
    message.focus();
  }

  #refuseFiles(data, event) {
    if (!data?.files.length || data.getData("text/plain")) return;
    event.preventDefault(); // else the browser would leave the page and show what was dropped
    this.dispatchEvent(new Event("files"));
  }

  #press(event) {
    if (event.isComposing || event.keyCode === COMPOSING) return;
    if (event.key === "ArrowUp" && !message.value) this.dispatchEvent(new Event("previous"));
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    this.#submit();
  }

  #submit() {
    const text = message.value.trim();
    if (!text || this.#streaming) return;
    if (!this.#isReady) {
      this.#queue(true);
      return;
    }
    this.#queue(false);
    message.value = "";
    this.#changed();
    this.dispatchEvent(new CustomEvent("send", { detail: text }));
  }

  #keepNow() {
    if (this.#timer === null) return;
    clearTimeout(this.#timer);
    this.#timer = null;
    keep(this.#key, message.value);
  }

  #queue(value) {
    this.#queued = value;
    const hadFocus = document.activeElement === element("unqueue");
    element("queued").hidden = !value;
    if (hadFocus && !value) message.focus(); // else it would be lost with the button
  }

  #changed() {
    fit();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#keepNow(), PAUSE_MS);
    if (message.value.length <= LONG_DRAFT_CHARS) this.#keepNow();
    if (this.#queued && !message.value.trim()) this.unqueue();
  }
}

function draftOf(key) {
  return unkept.get(key) ?? localStorage.getItem(DRAFT + key) ?? "";
}

function keyOf({ id, messages }) {
  return messages.length ? id : NEW;
}

function keep(key, text) {
  forget(key);
  if (!text.trim()) return;
  try {
    if (text.length > MAX_DRAFT_CHARS) throw new RangeError("It is too long.");
    localStorage.setItem(DRAFT + key, text);
  } catch {
    unkept.set(key, text); // the storage is full; it is not worth a word
  }
}

/** A conversation is gone, and what was begun in it too. */
export function forget(id) {
  unkept.delete(id);
  localStorage.removeItem(DRAFT + id);
}

function fit() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight, MAX_HEIGHT_PX)}px`;
}
