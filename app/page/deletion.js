// Deletes a conversation in the server.

import { request } from "./api.js";

const PATIENCE_MS = 10_000; // for which a request that was stopped may go on in the server
const AGAIN_MS = 200;

// Codes of a 404 that comes from the endpoint of a session, which is not known there.
const UNKNOWN = new Set(["session_not_found", "no_transcript"]);

/** The KV and the transcript leave every tier of the server, once the request that was just stopped has ended there. A
 * session it never heard of is as good as deleted. Returns whether the server can delete: false if it has no such endpoint.
 * Throws ApiError. */
export async function deleteSession(id) {
  for (const until = Date.now() + PATIENCE_MS; ; ) {
    try {
      await request(`/v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE" });
      return true;
    } catch (error) {
      if (error.status === 404 || error.status === 405) return UNKNOWN.has(error.code);
      if (error.code !== "session_busy" || Date.now() > until) throw error;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}
