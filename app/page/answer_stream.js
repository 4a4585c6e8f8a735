// One answer, followed from the request to its end, also through a loss of the connection.

import { ApiError, chat, models } from "./api.js";
import { tokensOf } from "./provenance.js";

const LOOK_AGAIN_MS = 1000;
const PATIENCE_MS = 600_000; // a large model takes minutes to load

/** Fill `answer` ({content, thought, thought_ms, report, end, limit}) from the server. `request(answer)` is the body that
 * asks for what is still to come: the whole answer, or the rest of one of which a part is there. A lost connection is
 * waited for, and the answer then goes on by itself, once; what had come of it stays. `told(state, progress)` hears
 * "waiting" while the server is away, "reading" with the prompt's progress before the first piece, and "growing" with each
 * piece. Returns the id of the last request. Throws ApiError, and what `fetch`
 * throws after an abort; `answer` then keeps what had come. */
export async function followAnswer(answer, request, { signal, told }) {
  const seen = { id: null };
  try {
    await take(answer, request(answer), signal, told, seen);
  } catch (error) {
    if (!(error instanceof ApiError) || !error.isAway) throw error;
    told("waiting");
    await serverIsBack(error, signal);
    if (!answer.content) Object.assign(answer, { thought: "", thought_ms: null }); // a thought cannot be continued
    await take(answer, request(answer), signal, told, seen);
  }
  return seen.id;
}

async function take(answer, body, signal, told, seen) {
  let thinkingSince = null;
  for await (const chunk of chat(body, signal)) {
    seen.id = chunk.id;
    answer.request_id = chunk.id;
    if (chunk.x_progress) {
      told("reading", chunk.x_progress);
      continue;
    }
    const choice = chunk.choices[0];
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    if (thought) {
      thinkingSince ??= Date.now();
      answer.thought += thought;
    }
    if (content) answer.content += content;
    if (thinkingSince !== null) answer.thought_ms = Date.now() - thinkingSince;
    if (content) thinkingSince = null; // it has thought to the end
    if (choice?.finish_reason) answer.end = choice.finish_reason;
    if (chunk.x_cache) answer.report = reportOf(chunk);
    told("growing");
  }
}

/** Wait until a model is served. Throws the error that began it if none is within ten minutes. */
async function serverIsBack(error, signal) {
  for (const until = Date.now() + PATIENCE_MS; Date.now() < until; ) {
    await pause(LOOK_AGAIN_MS, signal);
    try {
      await models();
      return;
    } catch (problem) {
      if (!(problem instanceof ApiError) || !(problem.isAway || problem.status === 503)) throw problem;
    }
  }
  throw error;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal.addEventListener("abort", stop, { once: true });
    if (signal.aborted) stop();
  });
}

function reportOf(chunk) {
  return {
    tokens: tokensOf(chunk.x_cache),
    recalled: chunk.x_cache.recalled_tokens ?? 0,
    reasons: chunk.x_cache.miss_reasons,
    diverged: chunk.x_cache.diverged_at,
    ttft_ms: chunk.timings?.ttft_ms ?? null,
    saved_ms: chunk.x_cache.saved_ms ?? null,
    timings: chunk.timings,
    completion_tokens: chunk.usage?.completion_tokens,
  };
}
