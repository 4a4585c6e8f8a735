"""Carries out commands on sessions, for both a session's KV in the engine and its transcript in the app."""

import asyncio
import contextlib
import secrets
import time
from typing import TypedDict, Unpack

from reprise.app.conversations.message_table import MessagePage
from reprise.app.conversations.text_thread import TextThread
from reprise.app.conversations.transcripts import KeptChat
from reprise.app.errors import ApiError, engine_lost, engine_timeout, engine_unavailable, session_error
from reprise.app.turn.alone import LoneServer
from reprise.app.turn.domains import domains_of
from reprise.app.turn.ports import EnginePort, ServerHooks
from reprise.app.turn.readiness import Readiness
from reprise.engine.messages import SessionReply, SessionRequest
from reprise.engine.process.client import EngineLost, EngineTimeout, EngineUnavailable

REPLY_TIMEOUT_S = 30.0  # for the engine to reply to a command


class Question(TypedDict, total=False):
    """The arguments of a request about sessions: the fields of `reprise.engine.messages.SessionRequest` except its
    action and tenant."""

    session_id: str
    pinned: bool | None
    ttl_s: float | None
    after: str
    limit: int


class SessionCommands:
    """A service that asks about, changes and deletes sessions. One per app, on its event loop."""

    def __init__(self, *, engine: EnginePort, readiness: Readiness, transcripts: TextThread) -> None:
        self.hooks: ServerHooks = LoneServer(self.delete_here)
        self._engine = engine
        self._readiness = readiness
        self._transcripts = transcripts
        self._under_way: set[asyncio.Task[None]] = set()  # tasks of `keep`

    async def ask(self, action: str, *, tenant: str = "", **fields: Unpack[Question]) -> SessionReply:
        """Send a request about sessions to the engine and return its reply. action: see
        `reprise.engine.messages.SessionRequest`. Raises ApiError."""
        request_id = f"sessions-{secrets.token_hex(12)}"
        request = SessionRequest(request_id=request_id, tenant=tenant, action=action, **fields)
        self._readiness.require_engine()
        try:
            reply = await self._engine.sessions(request, timeout_s=REPLY_TIMEOUT_S)
        except EngineUnavailable as error:
            raise engine_unavailable(error, str(self._engine.state)) from None
        except EngineTimeout:
            raise engine_timeout() from None
        except EngineLost:
            raise engine_lost() from None
        if reply.error_code is not None:
            raise session_error(reply.error_code, request.session_id or request.after)
        return reply

    async def patch(
        self, session_id: str, *, tenant: str, pinned: bool | None = None, ttl_s: float | None = None
    ) -> SessionReply:
        """Pin a session or change its time to live, for its KV and its transcript. Both must live equally long: without
        the transcript the KV would not be found. Raises ApiError."""
        reply = await self.ask("patch", tenant=tenant, session_id=session_id, pinned=pinned, ttl_s=ttl_s)
        for info in reply.sessions:
            kept_s = None if info.expires_s is None else info.expires_s - info.last_used_s
            self._transcripts.keep(info.session_id, tenant=tenant, ttl_s=kept_s)
            await self.hooks.keep(info.session_id, tenant=tenant, ttl_s=kept_s)
        return reply

    async def chats(self, *, tenant: str, cache_salt: str, after: str, limit: int) -> list[KeptChat]:
        """Return the conversations whose messages are stored and whose session id comes after `after`, in the order of
        these ids, at most `limit`. cache_salt: only conversations that were recorded with it."""
        domains = domains_of(tenant, cache_salt)
        return await self._transcripts.chats(domains, after=after, now=time.time(), limit=limit)

    async def messages(
        self, session_id: str, *, tenant: str, cache_salt: str, after: int, limit: int
    ) -> MessagePage | None:
        """Return the stored messages of a session after the message at index `after`, at most `limit`. None if no
        messages of the session are stored, or it has expired."""
        domains = domains_of(tenant, cache_salt)
        return await self._transcripts.messages(domains, session_id, after=after, now=time.time(), limit=limit)

    async def entitle(self, session_id: str, *, tenant: str, title: str | None) -> bool:
        """Set the title of a session, with any salt; None removes it. Returns False if no messages of the session are
        stored."""
        return await self._transcripts.entitle(session_id, tenant=tenant, title=title)

    async def delete(self, session_id: str, *, tenant: str) -> None:
        """Delete a session on every server that has it. Raises ApiError."""
        await self.hooks.delete(session_id, tenant=tenant)

    async def delete_here(self, session_id: str, *, tenant: str, may_stay_hidden: bool = False) -> None:
        """Delete a session's KV and transcript on this server. Raises ApiError: 404 if there is neither, 503 if some of
        it stays. may_stay_hidden: whether the transcript may stay in a file that is not used before the next start
        (`TextThread.hides_file`), because the caller deletes it then."""
        missing: ApiError | None = None
        try:
            await self.ask("delete", tenant=tenant, session_id=session_id)
        except ApiError as error:
            if error.status != 404:
                raise
            missing = error
        try:
            num_found = await self._transcripts.forget(session_id, tenant=tenant)
        except ApiError:
            if not (may_stay_hidden and self._transcripts.hides_file):
                raise
            num_found = 0
        if num_found == 0 and missing is not None:
            raise missing

    def keep(self, session_id: str, *, tenant: str, ttl_s: float) -> None:
        """Set a session's time to live by a background task, and return at once. Failures are ignored."""
        task = asyncio.create_task(self._keep(session_id, tenant, ttl_s))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Cancel what `keep` has not done yet."""
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, session_id: str, tenant: str, ttl_s: float) -> None:
        with contextlib.suppress(ApiError):
            await self.patch(session_id, tenant=tenant, ttl_s=ttl_s)
