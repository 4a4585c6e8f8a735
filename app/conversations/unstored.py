"""Keeps responses in memory that their store cannot take just now: on a full disk, or while it does not answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from reprise.app.conversations.response_store import MAX_ITEMS, Item, NotStored, TooLong
from reprise.app.conversations.room import make_room
from reprise.app.errors import ApiError

MAX_BYTES = 16 << 20  # most that all of them have as JSON
log = logging.getLogger(__name__)
_REFUSALS = (NotStored, ApiError)  # by which a store says that it cannot take a response now


class Store(Protocol):
    """The part of a store that reads and changes responses."""

    async def put(self, tenant: str, body: dict[str, Any], items: list[Item], previous: str | None) -> None: ...

    async def get(self, tenant: str, response_id: str) -> dict[str, Any]: ...

    async def input_items(self, tenant: str, response_id: str) -> list[Item]: ...

    async def history(self, tenant: str, response_id: str) -> list[Item]: ...

    async def delete(self, tenant: str, response_id: str) -> None: ...

    async def sweep(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Unstored:
    body: dict[str, Any]
    items: list[Item]
    previous: str | None
    num_bytes: int
    kept_s: float  # time.time()


class StoredResponses:
    """The responses that clients return to: those in a store, and those that the store could not take yet, which are
    kept in memory. They are stored, the oldest first, as soon as the store takes responses again. If the responses in
    memory take more than `max_bytes`, the oldest of the tenant with the most bytes is dropped; all are lost when the
    process ends. Used from the event loop. Raises NotStored and TooLong, and what the store raises when it is asked."""

    def __init__(self, store: Store, *, ttl_s: float, max_bytes: int = MAX_BYTES) -> None:
        self._store, self._ttl_s, self._max_bytes = store, ttl_s, max_bytes
        self._has_lost = False  # since all were stored
        self._kept: dict[tuple[str, str], _Unstored] = {}  # by tenant and id, the oldest first
        self._storing = asyncio.Lock()  # held while some of them are stored, or one is deleted

    async def put(self, tenant: str, body: dict[str, Any], items: list[Item], previous: str | None) -> None:
        """Store a response and its own input items, in place of a response with the same id. While the store refuses
        the response, it is kept in memory, to be stored later. previous: id of the response that it continues."""
        if await self.store_kept():
            try:
                await self._store.put(tenant, body, items, previous)
            except _REFUSALS as error:
                if not self._kept:  # once until all are stored
                    log.warning("responses are kept in memory, as they cannot be stored: %s", error)
            else:
                self._kept.pop((tenant, body["id"]), None)
                return
        num_bytes = len(msgspec.json.encode((body, items)))
        self._kept.pop((tenant, body["id"]), None)
        self._kept[tenant, body["id"]] = _Unstored(body, items, previous, num_bytes, time.time())
        if make_room(self._kept, self._max_bytes) and not self._has_lost:
            self._has_lost = True
            log.warning("the oldest responses that cannot be stored are lost: more than %d MiB", self._max_bytes >> 20)

    async def get(self, tenant: str, response_id: str) -> dict[str, Any]:
        kept = self._kept_one(tenant, response_id)
        return await self._store.get(tenant, response_id) if kept is None else kept.body

    async def input_items(self, tenant: str, response_id: str) -> list[Item]:
        """Return the items that a response was generated from, oldest first: the input and the output of the responses
        that it continues, then its own input."""
        kept = self._kept_one(tenant, response_id)
        if kept is None:
            return await self._store.input_items(tenant, response_id)
        before = [] if kept.previous is None else await self.history(tenant, kept.previous)
        return [*before, *kept.items]

    async def history(self, tenant: str, response_id: str) -> list[Item]:
        """Return everything that was said up to and including a response, oldest first."""
        turns = list(self._turns(tenant, response_id))
        before = turns[-1].previous if turns else response_id
        found = [] if before is None else await self._store.history(tenant, before)
        found += [item for turn in reversed(turns) for item in (*turn.items, *turn.body["output"])]
        if len(found) > MAX_ITEMS:
            raise TooLong(response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        async with self._storing:  # else it could be stored after it was deleted
            key = tenant, response_id
            with contextlib.suppress(NotStored) if key in self._kept else contextlib.nullcontext():
                await self._store.delete(tenant, response_id)
            self._kept.pop(key, None)  # not before: it stays if the store cannot delete an earlier state of it

    async def sweep(self) -> None:
        """Delete expired responses: those in memory `ttl_s` after they were put there, those of the store by its own
        rule. Also tries to store those that are left in memory."""
        self._forget_expired()
        await self.store_kept()
        await self._store.sweep()

    async def store_kept(self) -> bool:
        """Store the responses that are kept in memory, the oldest first, until the store refuses one. Returns whether
        none is left in memory."""
        async with self._storing:
            for (tenant, name), kept in list(self._kept.items()):
                try:
                    await self._store.put(tenant, kept.body, kept.items, kept.previous)
                except _REFUSALS:
                    return False
                except TooLong:
                    log.warning("a response has no room in the store even alone, and is lost")
                if self._kept.get((tenant, name)) is kept:  # else it was replaced meanwhile, or has expired
                    del self._kept[tenant, name]
            self._has_lost = False
        return not self._kept

    def _kept_one(self, tenant: str, response_id: str) -> _Unstored | None:
        self._forget_expired()
        return self._kept.get((tenant, response_id))

    def _turns(self, tenant: str, response_id: str | None) -> Iterator[_Unstored]:
        """Yield a response and those that it goes on from, the newest first, as long as they are kept here."""
        seen = set()
        while response_id is not None and response_id not in seen:
            seen.add(response_id)
            if (kept := self._kept_one(tenant, response_id)) is None:
                return
            yield kept
            response_id = kept.previous

    def _forget_expired(self) -> None:
        before = time.time() - self._ttl_s
        while self._kept and next(iter(self._kept.values())).kept_s < before:
            del self._kept[next(iter(self._kept))]
