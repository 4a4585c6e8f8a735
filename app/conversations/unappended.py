"""Keeps in memory what turns add to stored conversations, while their store cannot take it: on a full disk, or while it
does not answer."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import msgspec

from reprise.app.conversations.response_store import Item, NotStored, StoredConversation, TooLong, not_reachable
from reprise.app.conversations.room import make_room
from reprise.app.errors import ApiError

MAX_BYTES = 16 << 20  # most that all of it has as JSON
log = logging.getLogger(__name__)


class Store(Protocol):
    """The part of a store that reads and changes the items of conversations."""

    async def append(self, tenant: str, conversation_id: str, items: list[Item]) -> None: ...

    async def items(self, tenant: str, conversation_id: str) -> list[Item]: ...

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> StoredConversation: ...

    async def forget(self, tenant: str, conversation_id: str) -> None: ...


@dataclass(slots=True)
class _Unappended:
    items: list[Item]
    num_bytes: int


class StoredItems:
    """The items of conversations: those in a store, and those that the store could not take yet, which are kept in
    memory. They are appended to the store, in order, as soon as it takes items again. If the items in memory take more
    than `max_bytes`, the tenant with the most bytes loses those of its conversation that has waited longest. All are
    lost when the process ends. Used from the event loop. Raises NotStored, TooLong and what the store raises."""

    def __init__(self, store: Store, *, max_bytes: int = MAX_BYTES) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._kept: dict[tuple[str, str], _Unappended] = {}  # by tenant and conversation, the oldest first
        self._storing = asyncio.Lock()  # held while some of it is stored, so that nothing is stored twice

    async def append_turn(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        """Append the items that a turn adds. While the store refuses them they are kept in memory, to be stored
        later."""
        key = tenant, conversation_id
        if await self._store_kept(key):
            try:
                await self._store.append(tenant, conversation_id, items)
            except ApiError as error:
                if not self._kept:  # once until all is stored
                    log.warning("what turns add to conversations is kept in memory, as it cannot be stored: %s", error)
            else:
                return
        kept = self._kept.setdefault(key, _Unappended([], 0))
        kept.items += items
        kept.num_bytes += len(msgspec.json.encode(items))
        if make_room(self._kept, self._max_bytes):
            log.warning("what turns have added to a conversation is lost: more than %d MiB", self._max_bytes >> 20)

    async def append(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        """Append items that a client has sent, after those that are still kept in memory. Raises ApiError 503 if they
        cannot be stored now."""
        await self._require_stored(tenant, conversation_id)
        await self._store.append(tenant, conversation_id, items)

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """Return all items of a conversation, oldest first."""
        key = tenant, conversation_id
        before = self._kept.get(key)
        found = await self._store.items(tenant, conversation_id)
        return [*found, *_missing(found, self._kept.get(key, before))]  # it may have been stored since it was read

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> StoredConversation:
        await self._require_stored(tenant, conversation_id)
        return await self._store.delete_item(tenant, conversation_id, item_id)

    async def forget(self, tenant: str, conversation_id: str) -> None:
        async with self._storing:
            await self._store.forget(tenant, conversation_id)
            self._kept.pop((tenant, conversation_id), None)

    async def store_kept(self) -> None:
        """Store the items that are kept in memory, one conversation after the other. Stop at the first that the store
        refuses."""
        for key in list(self._kept):
            if not await self._store_kept(key):
                return

    async def _require_stored(self, tenant: str, conversation_id: str) -> None:
        """Raise ApiError 503 while something has to be appended before."""
        if not await self._store_kept((tenant, conversation_id)):
            raise not_reachable()

    async def _store_kept(self, key: tuple[str, str]) -> bool:
        """Give the store what it could not take of a conversation. Returns whether nothing is left here."""
        async with self._storing:
            if (kept := self._kept.get(key)) is None:
                return True
            count = len(kept.items)
            try:
                # A store that gave no answer may have taken it.
                missing = _missing(await self._store.items(*key), kept)
                if missing:
                    await self._store.append(*key, missing)
            except ApiError:
                return False
            except (NotStored, TooLong) as error:
                log.warning("what turns have added to a conversation is lost: %s", type(error).__name__)
            if self._kept.get(key) is not kept or len(kept.items) > count:  # more has come meanwhile
                return self._kept.get(key) is None
            del self._kept[key]
            return True


def _missing(found: list[Item], kept: _Unappended | None) -> list[Item]:
    """Return what is kept and not among the items that were found."""
    if kept is None:
        return []
    known = {item["id"] for item in found}
    return [item for item in kept.items if item["id"] not in known]
