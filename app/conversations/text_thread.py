"""Transcripts on threads of their own: a long prompt or a busy disk must not hold up the streams of others."""

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from app.conversations.prepared_prompt import PreparedPrompt
from app.conversations.transcripts import Transcripts

SWEEP_S = 60.0
LONG_CHARS = 1 << 18  # of messages; fewer are tokenized in half a second at most

log = logging.getLogger(__name__)


class TextThread:
    """`app.conversations.transcripts.Transcripts` for the event loop. First in, first out: what was recorded before a
    prompt is prepared is there for it. How many prompts wait is bounded by who is admitted.

    Long prompts wait for each other on a second thread, one of each tenant at a time, so nobody's short ones wait for
    them and no tenant's for all of another's."""

    def __init__(self, transcripts: Transcripts) -> None:
        self._transcripts = transcripts
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._long_executor = ThreadPoolExecutor(1, thread_name_prefix="long text")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of tenants with long prompts

    async def prepare(self, *, tenant: str, messages: list[dict[str, Any]], **fields: Any) -> PreparedPrompt:
        """As `Transcripts.prepare`. Cancelled while it waits, it is not called."""
        loop = asyncio.get_running_loop()
        call = partial(self._transcripts.prepare, tenant=tenant, messages=messages, **fields)
        if sum(len(value) for message in messages for value in message.values() if isinstance(value, str)) < LONG_CHARS:
            return await loop.run_in_executor(self._executor, call)
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            await loop.run_in_executor(self._executor, _nothing)  # behind all that was recorded before
            return await loop.run_in_executor(self._long_executor, call)

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

    async def sweep_forever(self) -> None:
        """Delete expired transcripts every SWEEP_S, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.time())

    async def close(self) -> None:
        """After all that was recorded is written."""
        await asyncio.to_thread(self._long_executor.shutdown, cancel_futures=True)
        await asyncio.get_running_loop().run_in_executor(self._executor, self._transcripts.close)
        self._executor.shutdown(wait=False)


def _nothing() -> None:
    """Done when everything in front of it is."""


def _log_failure(future: "Future[Any]") -> None:
    if (error := future.exception()) is not None:
        # Without the transcript the next turn is tokenized anew; nothing else is lost.
        log.error("a transcript was not kept", exc_info=error)
