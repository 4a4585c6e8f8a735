"""Transcripts on a thread of their own: a long prompt or a busy disk must not hold up the streams of others."""

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from app.transcript import PreparedPrompt, Transcripts

log = logging.getLogger(__name__)


class TextThread:
    """`app.transcript.Transcripts` for the event loop. First in, first out: what was recorded before a prompt is
    prepared is there for it. How many prompts wait is bounded by who is admitted."""

    def __init__(self, transcripts: Transcripts) -> None:
        self._transcripts = transcripts
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")

    async def prepare(self, **fields: Any) -> PreparedPrompt:
        """As `Transcripts.prepare`. Cancelled while it waits, it is not called."""
        call = partial(self._transcripts.prepare, **fields)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def record(self, prompt: PreparedPrompt, **fields: Any) -> None:
        """As `Transcripts.record`, without waiting for it."""
        self._executor.submit(self._transcripts.record, prompt, **fields).add_done_callback(_log_failure)

    def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """As `Transcripts.keep`, without waiting for it."""
        call = partial(self._transcripts.keep, session_id, tenant=tenant, ttl_s=ttl_s)
        self._executor.submit(call).add_done_callback(_log_failure)

    async def forget(self, session_id: str, *, tenant: str) -> int:
        """As `Transcripts.forget`, after all that was recorded before."""
        call = partial(self._transcripts.forget, session_id, tenant=tenant)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def sweep(self, now: float) -> None:
        self._executor.submit(self._transcripts.sweep, now).add_done_callback(_log_failure)

    async def close(self) -> None:
        """After all that was recorded is written."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._transcripts.close)
        self._executor.shutdown(wait=False)


def _log_failure(future: "Future[Any]") -> None:
    if (error := future.exception()) is not None:
        # Without the transcript the next turn is tokenized anew; nothing else is lost.
        log.error("a transcript was not kept", exc_info=error)
