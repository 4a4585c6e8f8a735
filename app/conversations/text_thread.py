"""Runs the transcripts on threads of their own, because a long prompt or a busy disk must not delay other streams."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from reprise.app.conversations.first_tools import FirstTools
from reprise.app.conversations.message_table import MessagePage
from reprise.app.conversations.offered import Offered, Tools
from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.conversations.transcript_rows import Exported
from reprise.app.conversations.transcripts import KeptChat, Transcripts
from reprise.app.errors import unavailable
from reprise.app.state_disk import DiskAway

SWEEP_S = 60.0
LONG_CHARS = 1 << 18  # characters of all messages; fewer are tokenized in half a second at most

T = TypeVar("T")
log = logging.getLogger(__name__)


class TextThread:
    """A caller of `reprise.app.conversations.transcripts.Transcripts` for the event loop. Calls are carried out one
    after the other on one thread, in the order in which they come, so a prompt finds what was recorded before it was
    prepared. Admission bounds how many prompts wait.

    Long prompts go through a second thread, one of each tenant at a time. So no short prompt waits for a long one, and
    no tenant's long prompt waits for all of another tenant's.
    """

    def __init__(self, transcripts: Transcripts) -> None:
        self._transcripts = transcripts
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._long_executor = ThreadPoolExecutor(1, thread_name_prefix="long text")
        self._first_tools = FirstTools()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = (
            WeakValueDictionary()
        )  # locks of tenants with long prompts

    async def prepare(self, *, tenant: str, messages: list[dict[str, Any]], **fields: Any) -> PreparedPrompt:
        """Return the token ids of a chat request, and its session: call `Transcripts.prepare` on a thread, with its
        arguments. A call that is cancelled while it waits for the thread is not made."""
        loop = asyncio.get_running_loop()
        call = partial(self._transcripts.prepare, tenant=tenant, messages=messages, **fields)
        if not _is_long(messages):
            return await loop.run_in_executor(self._executor, call)
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            await loop.run_in_executor(self._executor, _nothing)  # after all that was recorded before
            return await loop.run_in_executor(self._long_executor, call)

    async def first_seen(self, tools: Tools, *, tenant: str) -> Offered:
        """Return a request's tools with the keys of their JSON objects in the order in which this tenant first sent
        equal tools."""
        return await self._first_tools.first_seen(tenant, tools, self._find_tools)

    async def _find_tools(self, key: bytes) -> Tools | None:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._transcripts.tools, key)

    async def begun(self, prompt: PreparedPrompt, text: str) -> tuple[list[int], int]:
        """Call `Transcripts.begun` after all that was recorded before."""
        call = partial(self._transcripts.begun, prompt, text, now=time.time())
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def record(self, prompt: PreparedPrompt, **fields: Any) -> None:
        """Queue the recording of an answer, and return at once. fields: further arguments of `Transcripts.record`. A
        failure is only logged."""
        self._executor.submit(self._transcripts.record, prompt, **fields).add_done_callback(_log_failure)

    def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """Queue a change of how long the sessions of this id, with any salt, are stored, and return at once: `ttl_s`
        after their last use; None: for as long as there is room. A failure is only logged."""
        call = partial(self._transcripts.keep, session_id, tenant=tenant, ttl_s=ttl_s)
        self._executor.submit(call).add_done_callback(_log_failure)

    @property
    def hides_file(self) -> bool:
        """Return whether a file with transcripts lies there that is not used before the next start."""
        return self._transcripts.hides_file

    async def forget(self, session_id: str, *, tenant: str) -> int:
        """Delete what a tenant has recorded under this id, with any salt, also what is still queued to be recorded.
        Returns the number of deleted sessions. Raises ApiError 503 `not_deleted` while the disk does not answer."""
        call = partial(self._transcripts.forget, session_id, tenant=tenant)
        return await self._asked(call, code="not_deleted")

    async def entitle(self, session_id: str, *, tenant: str, title: str | None) -> bool:
        """Set the title of the sessions that a tenant has recorded under this id, with any salt; None removes it.
        Returns False if none of them has stored messages, since only sessions with messages have titles. Answers that
        are queued to be recorded are recorded first. Raises ApiError 503 while the disk does not answer."""
        call = partial(self._transcripts.entitle, session_id, tenant=tenant, title=title)
        return await self._asked(call)

    async def chats(self, tenants: tuple[str, str], *, after: str, now: float, limit: int) -> list[KeptChat]:
        """Return the conversations whose messages are stored and whose session id comes after `after`, in the order of
        these ids, at most `limit`. tenants: the domains to look in, from `domains_of`. Answers that are queued to be
        recorded are recorded first. Raises ApiError 503 while the disk does not answer."""
        call = partial(self._transcripts.chats, tenants, after=after, now=now, limit=limit)
        return await self._asked(call)

    async def messages(
        self, tenants: tuple[str, str], session_id: str, *, after: int, now: float, limit: int
    ) -> MessagePage | None:
        """Return the stored messages of a session after the message at index `after`, at most `limit`. None if no
        messages of the session are stored, or it has expired. tenants: the domains to look in, from `domains_of`.
        Answers that are queued to be recorded are recorded first. Raises ApiError 503 while the disk does not
        answer."""
        call = partial(self._transcripts.messages, tenants, session_id, after=after, now=now, limit=limit)
        return await self._asked(call)

    async def export(self, session_id: str, *, tenant: str, after: int, most: int) -> Exported:
        """Return the answers of a session that were recorded after the one with the id `after`, each encoded as a row
        that other servers can `adopt`: at most the newest `most`. tenant: with the salt, if there is one. Answers that
        are queued to be recorded are recorded first."""
        call = partial(self._transcripts.export, session_id, tenant=tenant, after=after, most=most)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def adopt(self, session_id: str, rows: Mapping[bytes, bytes], *, tenant: str, now: float, after: int) -> int:
        """Record the answers of a session that other servers have exported. rows: digest of an answer -> its encoded
        row. after: id of the newest answer that this server has exported. Returns the id to give as `after` to the next
        `export`."""
        call = partial(self._transcripts.adopt, session_id, rows, tenant=tenant, now=now, after=after)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def names(self) -> list[tuple[str, str]]:
        """Return (tenant with its salt, session id) of all sessions. Raises ApiError 503 while the disk does not
        answer."""
        return await self._asked(self._transcripts.names)

    async def _asked(self, call: Callable[[], T], *, code: str = "unavailable") -> T:
        """Do on the thread what a client asks for by name. Raises ApiError 503 with this code, and the cause, while the
        disk does not answer or cannot be written to."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except DiskAway as error:
            message = f"The disk that keeps conversations cannot do this now: {error}. Try again when it can."
            raise unavailable(message, code=code, retry_after_s=5.0) from None

    def sweep(self, now: float) -> None:
        self._executor.submit(self._transcripts.sweep, now).add_done_callback(_log_failure)

    async def sweep_forever(self) -> None:
        """Delete expired transcripts every SWEEP_S, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.time())

    async def close(self) -> None:
        """Record the answers that are queued, close the transcripts, and end the threads. Long prompts that wait are
        not prepared any more."""
        await asyncio.to_thread(self._long_executor.shutdown, cancel_futures=True)
        await asyncio.get_running_loop().run_in_executor(self._executor, self._transcripts.close)
        self._executor.shutdown(wait=False)


def _is_long(value: object) -> bool:
    """Return whether a JSON value has LONG_CHARS characters of text or more, wherever they stand."""
    chars, left = 0, [value]
    while left and chars < LONG_CHARS:
        match left.pop():
            case str(text):
                chars += len(text)
            case dict(fields):
                left += fields.values()
            case list(items):
                left += items
    return chars >= LONG_CHARS


def _nothing() -> None:
    """Do nothing. When this has run on the thread, everything submitted before has run too."""


def _log_failure(future: "Future[Any]") -> None:
    if (error := future.exception()) is not None:
        # Without the transcript the next turn is tokenized anew; nothing else is lost.
        log.error("a transcript was not kept", exc_info=error)
