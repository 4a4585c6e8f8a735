// Keeps what this browser and the server know of conversations together: names, and what was said elsewhere.

import { onDemand } from "./on_demand.js";
import * as store from "./store.js";

export class Joined {
  #chat;
  #server;
  #changed;
  #seen = new Map(); // conversation -> when the server had last used it when it was looked at

  /** `changed()` is called when the list has to be drawn anew. */
  constructor(chat, server, changed) {
    this.#chat = chat;
    this.#server = server;
    this.#changed = changed;
    server.addEventListener("change", () => this.#follow());
  }

  /** What was said in the conversation that is open may have gone on in another browser. */
  async catchUp() {
    const { conversation } = this.#chat;
    const row = this.#server.get(conversation.id);
    if (!row?.count || this.#chat.streaming || this.#seen.get(row.id) === row.updated) return;
    this.#seen.set(row.id, row.updated);
    const found = await onDemand("bring").catch(() => null); // it is looked at again when the list is another one
    const now = await found?.catchUp(conversation, row);
    if (!now || this.#chat.conversation !== conversation || this.#chat.streaming) return;
    this.#chat.replace(now);
    this.#changed();
  }

  /** As `joinTurn`. What a turn writes over that did not hear of it in time is joined later, in the browser that said it. */
  async join(conversation, answer, question, signal) {
    try {
      const mayBeBusy = this.#server.get(conversation.id)?.running;
      return await (await onDemand("bring")).joinTurn(conversation, answer, question, { signal, mayBeBusy });
    } catch (error) {
      if (error.code === "elsewhere") throw error;
      return false;
    }
  }

  /** The list of the server is another one: names that were given elsewhere count here too. */
  async #follow() {
    const here = new Map(store.list().map(({ id, title }) => [id, title]));
    for (const [id, title] of this.#server.titles()) {
      if (!here.has(id) || here.get(id) === title) continue;
      await store.rename(id, title);
      if (id === this.#chat.conversation.id) this.#chat.conversation.title = title;
    }
    this.#nameInServer(this.#chat.conversation);
    this.#changed();
    this.catchUp();
  }

  /** A name that does not follow from what was said, such as that of a fork, is told once the server knows the conversation. */
  #nameInServer({ id, title }) {
    const row = this.#server.get(id);
    const isKnown = !row?.count || row.title !== null || row.firstText.startsWith(title.replaceAll(/\s+/g, " ").trim());
    if (!isKnown) this.#server.rename(id, title);
  }
}
