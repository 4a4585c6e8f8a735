// What the server tells of itself while the page is seen: turns that have got their first token, and its state.

import { liveEvents } from "./api.js";
import { tokensOf } from "./provenance.js";

const MAX_TURNS = 240;
const RETRY_MS = [500, 1000, 2000, 5000];

/** Events: `turn` for every answer's first token, `turns` when some came, `state` with all of it, `engine` with the engine's
 * state or "away", `sessions` with those used last, `key` when one is wanted, `fleet` while the server is one of a fleet's,
 * `refusal` when there is one. */
export class Feed extends EventTarget {
  turns = []; // the last ones, the oldest first, each with its `tokens` by source
  state = null; // the one that was told last
  refusal = null; // why the server tells nothing, as a sentence
  #abort = null;

  /** Listen until `stop`, through restarts of the server. */
  async start() {
    this.stop();
    const abort = new AbortController();
    this.#abort = abort;
    for (let failures = 0; !abort.signal.aborted; failures += 1) {
      this.refusal = null;
      try {
        for await (const { event, data } of liveEvents(abort.signal)) {
          failures = 0;
          if (event === "turns") this.#hear(data);
          else if (event === "state") this.#show(data);
        }
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error.status === 401) {
          this.#tell("key");
          return;
        }
        this.refusal = error.status ? error.message : null;
      }
      if (this.refusal) this.#tell("refusal"); // the chat works all the same
      else this.#tell("engine", "away");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  #hear(turns) {
    const known = new Set(this.turns.map((turn) => turn.request_id));
    for (const turn of turns) {
      if (known.has(turn.request_id)) continue; // told again after a reconnect
      this.turns.push({ ...turn, tokens: tokensOf(turn) });
      this.#tell("turn", turn);
    }
    this.turns = this.turns.slice(-MAX_TURNS);
    this.#tell("turns");
  }

  #show(state) {
    this.state = state;
    this.#tell("engine", state.engine);
    if (state.replica) this.#tell("fleet");
    this.#tell("sessions", state.sessions);
    this.#tell("state", state);
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
