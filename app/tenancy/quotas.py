"""Limits how many conversations a key may keep and how much KV.

Sessions unused for longest are deleted first; if what cannot be deleted still exceeds a quota, new answers are refused.
Checked after each answer, so running answers may exceed a quota until they end.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from reprise.app.errors import ApiError, quota_exceeded
from reprise.app.tenancy.keyring import KeyLimits
from reprise.engine.messages import SessionInfo, SessionReply

PAGE = 1000  # sessions per listing
LOOK_S = 1.0  # between two checks of one tenant, because the engine walks all blocks of its sessions


class SessionAccess(Protocol):
    """The part of `reprise.app.turn.sessions.SessionCommands` used here. Its methods raise ApiError."""

    async def ask(self, action: str, *, tenant: str, after: str, limit: int) -> SessionReply: ...
    async def delete_here(self, session_id: str, *, tenant: str) -> None: ...


class Holdings(Protocol):
    """The sessions that tenants store, on this server or in a whole fleet."""

    async def trim(self, tenant: str, limits: KeyLimits) -> str:
        """Delete the sessions that exceed the tenant's quota, those unused for longest first. Returns what still
        exceeds the quota, as text; empty if nothing does. Raises ApiError if that cannot be found out now."""
        ...


class Quotas:
    """An enforcer of the quotas. One per app; to be used on its event loop."""

    def __init__(
        self,
        *,
        limits: Callable[[str], KeyLimits],
        holdings: Holdings,
        look_s: float = LOOK_S,
    ) -> None:
        self._limits = limits
        self._holdings = holdings
        self._look_s = look_s
        # tenant -> what exceeds its quota even after all deletable sessions were deleted
        self._over: dict[str, str] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}  # tenant -> its running or scheduled check
        self._looked_s: dict[str, float] = {}

    async def check(self, tenant: str) -> None:
        """Admit a request. Raises ApiError 429 if its tenant exceeds its quota, and still does after another check."""
        if tenant in self._over:
            self.changed(tenant)
            if (look := self._looks.get(tenant)) is None:  # its quotas were removed
                del self._over[tenant]
            else:
                await asyncio.shield(look)
        if tenant in self._over:
            raise quota_exceeded(self._over[tenant], retry_after_s=self._look_s)

    def changed(self, tenant: str) -> None:
        """Start a check in the background, if the tenant has quotas. To be called when what the tenant stores may have
        grown."""
        limits = self._limits(tenant)
        if (limits.sessions or limits.cache_bytes) and tenant not in self._looks:
            task = asyncio.create_task(self._look(tenant, limits))
            self._looks[tenant] = task
            task.add_done_callback(lambda _: self._looks.pop(tenant, None))

    async def close(self) -> None:
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    async def _look(self, tenant: str, limits: KeyLimits) -> None:
        await asyncio.sleep(self._looked_s.get(tenant, 0.0) + self._look_s - time.monotonic())
        self._looked_s[tenant] = time.monotonic()
        try:
            over = await self._holdings.trim(tenant, limits)
        except ApiError:
            return  # the engine cannot answer now; the next answer triggers another check
        if over:
            self._over[tenant] = over
        else:
            self._over.pop(tenant, None)


class HeldHere:
    """The sessions that tenants store on this server. Implements `Holdings` for a server without a fleet."""

    def __init__(self, sessions: SessionAccess) -> None:
        self._sessions = sessions

    async def trim(self, tenant: str, limits: KeyLimits) -> str:
        """Delete sessions of this server that exceed a quota, the longest unused first. Returns what still exceeds a
        quota; empty if nothing does."""
        kept = await self._sessions_of(tenant)
        for info in leaving(kept, limits):
            try:
                await self._sessions.delete_here(info.session_id, tenant=tenant)
            except ApiError as error:
                if error.status not in (404, 409):  # deleted already, or running again and therefore kept
                    raise
                if error.status == 409:
                    continue
            kept.remove(info)
        return excess_of(kept, limits)

    async def _sessions_of(self, tenant: str) -> list[SessionInfo]:
        kept: list[SessionInfo] = []
        while True:
            after = kept[-1].session_id if kept else ""
            reply = await self._sessions.ask("list", tenant=tenant, after=after, limit=PAGE)
            kept += reply.sessions
            if not reply.more or not reply.sessions:
                return kept


def excess_of(kept: list[SessionInfo], limits: KeyLimits) -> str:
    """Say how the sessions that a tenant has exceed its quotas, in number or in bytes of KV; empty if they do not."""
    return excess(len(kept), sum(map(_size, kept)), limits)


def excess(sessions: int, size_bytes: int, limits: KeyLimits) -> str:
    """Say how a number of sessions, or the bytes of their KV, exceed a key's limits; empty if they do not."""
    if limits.sessions and sessions > limits.sessions:
        return f"{sessions} conversations, of at most {limits.sessions}"
    if limits.cache_bytes and size_bytes > limits.cache_bytes:
        return f"{size_bytes} bytes of KV, of at most {limits.cache_bytes}"
    return ""


def leaving(kept: list[SessionInfo], limits: KeyLimits) -> list[SessionInfo]:
    """Return the sessions to delete so that the others meet the quota, those unused for longest first. Pinned and
    running sessions stay, and so does the newest, which was just used."""
    oldest_first = sorted(kept, key=lambda info: info.last_used_s)
    stays = len(kept)
    held = sum(map(_size, kept))
    gone = []
    for info in oldest_first[:-1]:
        fits = (not limits.sessions or stays <= limits.sessions) and (
            not limits.cache_bytes or held <= limits.cache_bytes
        )
        if fits:
            break
        if not (info.pinned or info.running):
            gone.append(info)
            stays -= 1
            held -= _size(info)
    return gone


def _size(info: SessionInfo) -> int:
    return sum(info.bytes.values())
