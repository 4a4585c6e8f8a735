// The server: keys, requests, and server-sent events read from a fetch, since EventSource sends no Authorization.

const KEY = "reprise.key";

// Codes of errors after which the same request will be answered, once the server is there again.
const AWAY = new Set(["connection", "loading", "restarting", "engine_lost", "draining", "no_replica"]);

// Of errors that come in a stream, which has a status of its own.
const STATUS = { invalid_request_error: 400, authentication_error: 401, rate_limit_error: 429 };

export class ApiError extends Error {
  constructor(status, message, code, retryAfterS) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  /** Whether the server is away and may come back, which is no fault of the request. */
  get isAway() {
    return AWAY.has(this.code);
  }

  /** For people: what it was, and when to try again where the server says so. */
  get sentence() {
    return this.retryAfterS ? `${this.message} It asks to wait ${this.retryAfterS}\u00a0s before another try.` : this.message;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  set(key, remember) {
    this.forget();
    if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
  remembered: () => localStorage.getItem(KEY) !== null,
};

/** The response to a request, with the key. Throws ApiError if it is no success. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const sent = fetch(path, {
    method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
  });
  const response = await sent.catch((error) => {
    throw signal?.aborted ? error : new ApiError(0, "There is no connection to the server.", "connection", null);
  });
  if (response.ok) return response;
  const error = await response.json().then((answer) => answer.error, () => null);
  const message = error?.message ?? `The server answered ${response.status}.`;
  throw new ApiError(response.status, message, error?.code, Number(response.headers.get("retry-after")) || null);
}

/** {event, data} of a text/event-stream, data parsed; ends at [DONE] or with the stream. */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        let data = null;
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          else if (line.startsWith("data: ")) data = line.slice(6);
        }
        if (data === "[DONE]") return;
        if (data !== null) yield { event, data: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What a path answers, as JSON. */
export async function askFor(path, signal) {
  return (await request(path, { signal })).json();
}

export async function models() {
  return (await (await request("/v1/models")).json()).data;
}

/** The chunks of a streamed answer. An error in the stream is thrown, as one before it is, and so is its end before the
 * answer's: a proxy may cut a stream in the middle, or answer itself. */
export async function* chat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST", signal, body: { ...body, stream: true, stream_options: { include_usage: true, include_progress: true } },
  });
  const lost = () => new ApiError(0, "The connection to the server was lost.", "connection", null);
  let ended = false;
  try {
    for await (const { data } of serverSentEvents(response)) {
      if (data.error) throw new ApiError(STATUS[data.error.type] ?? response.status, data.error.message, data.error.code, null);
      ended ||= Boolean(data.choices?.[0]?.finish_reason);
      yield data;
    }
  } catch (error) {
    throw signal.aborted || error instanceof ApiError ? error : lost();
  }
  if (!ended) throw lost();
}

export async function* liveEvents(signal) {
  yield* serverSentEvents(await request("/v1/events", { signal }));
}

/** A page of this key's conversations, with titles where the server keeps them. */
export function listSessions(after) {
  return askFor(`/v1/sessions?titles=true&limit=500&after=${encodeURIComponent(after)}`);
}

/** Change a conversation's `title` or `pinned` in the server. */
export async function changeSession(id, change) {
  return (await request(`/v1/sessions/${encodeURIComponent(id)}`, { method: "PATCH", body: change })).json();
}

/** Tells the server that a conversation will go on: it brings the KV to memory meanwhile. Nothing depends on it, so it
 * fails silently. Returns whether the server may know the conversation. */
export function expectTurn(id) {
  const told = request(`/v1/sessions/${encodeURIComponent(id)}/prefetch`, { method: "POST", body: {} });
  return told.then(() => true, (error) => error.status !== 404);
}
