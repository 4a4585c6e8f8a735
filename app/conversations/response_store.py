"""Stores responses and conversations that clients return to in one bounded SQLite file, separately for each tenant."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from reprise.app.conversations.database import Database
from reprise.app.errors import ApiError, unavailable
from reprise.app.state_disk import DiskAway, StateDisk, require_wanted

SCHEMA_VERSION = 1
MAX_CHAIN = 1024  # responses in a row, each going on from the one before
MAX_ITEMS = 4096  # most in a conversation, or in a chain of responses
EVICT_BATCH = 8  # deleted at once for room; few, so that little more goes than has to
SWEEP_BATCH = 200

_SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used REAL NOT NULL,
    body BLOB NOT NULL, input BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX responses_by_use ON responses (used);
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, used REAL NOT NULL, created INTEGER NOT NULL, metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX conversations_by_use ON conversations (used);
CREATE TABLE items (
    conversation TEXT NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (conversation, place)
) WITHOUT ROWID;
CREATE INDEX items_by_id ON items (id)
"""

Item = dict[str, Any]
T = TypeVar("T")
_encode = msgspec.json.encode
_decode = msgspec.json.decode


class NotStored(Exception):
    """The record does not exist, or belongs to another tenant."""


class TooLong(Exception):
    """The conversation would have more items, or more bytes, than allowed."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    id: str
    created: int
    metadata: dict[str, str]


class ResponseStore:
    """A store of responses and conversations, used from the event loop; one thread does the work. If there is no room,
    the tenant that stores the most loses what it used longest ago, so that no tenant can displace the records of others
    by storing more. Raises NotStored and TooLong, and ApiError 503 while the disk does not answer or has no room. In a
    damaged file nothing is found."""

    def __init__(self, *, path: Path | None, max_bytes: int, ttl_s: float, disk: StateDisk | None = None) -> None:
        self._db = Database(path=path, schema=_SCHEMA, version=SCHEMA_VERSION, disk=disk)
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown(wait=False)

    # --- responses ----------------------------------------------------------------------------------------------------

    async def put(self, tenant: str, body: dict[str, Any], items: list[Item], previous: str | None) -> None:
        """Store a response and its own input items, in place of a response with the same id. previous: id of the
        response that it continues."""
        values = (body["id"], tenant, previous, time.time(), _encode(body), _encode(items))

        def write() -> None:
            self._db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", values)
            self._make_room()

        await self._run(write)
        await self._shrink()

    async def get(self, tenant: str, response_id: str) -> dict[str, Any]:
        body, _, _ = await self._run(lambda: self._response(tenant, response_id))
        return body

    async def input_items(self, tenant: str, response_id: str) -> list[Item]:
        """Return the items that a response was generated from, oldest first: the input and the output of the responses
        that it continues, then its own input."""

        def read() -> tuple[list[Item], list[str]]:
            _, items, previous = self._response(tenant, response_id)
            earlier, used = self._history(tenant, previous)
            return [*earlier, *items], used

        items, used = await self._run(read)
        await self._note_use("responses", used)
        return items

    async def history(self, tenant: str, response_id: str) -> list[Item]:
        """Return everything that was said up to and including a response, oldest first."""
        items, used = await self._run(lambda: self._history(tenant, response_id))
        await self._note_use("responses", used)
        return items

    async def delete(self, tenant: str, response_id: str) -> None:
        def remove() -> None:
            self._response(tenant, response_id)
            self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

        await self._delete(remove)

    def _response(self, tenant: str, response_id: str) -> tuple[dict[str, Any], list[Item], str | None]:
        found = self._db.execute(
            "SELECT body, input, previous FROM responses WHERE id = ? AND tenant = ? AND used > ?",
            (response_id, tenant, time.time() - self._ttl_s),
        ).fetchone()
        if found is None:
            raise NotStored(response_id)
        return _decode(found[0]), _decode(found[1]), found[2]

    def _history(self, tenant: str, response_id: str | None) -> tuple[list[Item], list[str]]:
        """Return what was said up to a response, and the ids of the responses in which it was."""
        turns: list[list[Item]] = []
        names: list[str] = []
        count = 0
        while response_id is not None:
            body, items, previous = self._response(tenant, response_id)
            names.append(response_id)
            turns.append([*items, *body["output"]])
            count += len(turns[-1])
            if len(turns) > MAX_CHAIN or count > MAX_ITEMS:
                raise TooLong(response_id)
            response_id = previous
        return [item for turn in reversed(turns) for item in turn], names

    # --- conversations ------------------------------------------------------------------------------------------------

    async def create(
        self, tenant: str, conversation_id: str, metadata: dict[str, str], items: list[Item]
    ) -> StoredConversation:
        """Store a new conversation. items: its first items, which have ids."""

        def write() -> StoredConversation:
            now = time.time()
            values = (conversation_id, tenant, now, int(now), _encode(metadata))
            self._db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", values)
            self._append(conversation_id, items)
            self._make_room()
            require_wanted()  # else a client that tries again makes two
            return StoredConversation(conversation_id, int(now), metadata)  # the file shrinks with the next response

        return await self._run(write)

    async def conversation(self, tenant: str, conversation_id: str) -> StoredConversation:
        found = await self._run(lambda: self._conversation(tenant, conversation_id))
        await self._note_use("conversations", [conversation_id])
        return found

    async def update(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> StoredConversation:
        def write() -> StoredConversation:
            found = self._conversation(tenant, conversation_id)
            self._db.execute(
                "UPDATE conversations SET metadata = ?, used = ? WHERE id = ?",
                (_encode(metadata), time.time(), found.id),
            )
            return StoredConversation(found.id, found.created, metadata)

        return await self._run(write)

    async def forget(self, tenant: str, conversation_id: str) -> None:
        def remove() -> None:
            self._conversation(tenant, conversation_id)
            self._remove_conversation(conversation_id)

        await self._delete(remove)

    async def append(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        def write() -> None:
            self._conversation(tenant, conversation_id)
            self._append(conversation_id, items)
            self._make_room()
            require_wanted()  # else a client that tries again adds them twice

        await self._run(write)

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """Return all items of a conversation, oldest first."""

        def read() -> list[Item]:
            self._conversation(tenant, conversation_id)
            rows = self._db.execute("SELECT body FROM items WHERE conversation = ? ORDER BY place", (conversation_id,))
            return [_decode(body) for (body,) in rows]

        items = await self._run(read)
        await self._note_use("conversations", [conversation_id])
        return items

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> StoredConversation:
        def remove() -> StoredConversation:
            found = self._conversation(tenant, conversation_id)
            values = (conversation_id, item_id)
            if self._db.execute("DELETE FROM items WHERE conversation = ? AND id = ?", values).rowcount == 0:
                raise NotStored(item_id)
            return found

        return await self._delete(remove)

    def _conversation(self, tenant: str, conversation_id: str) -> StoredConversation:
        found = self._db.execute(
            "SELECT created, metadata FROM conversations WHERE id = ? AND tenant = ? AND used > ?",
            (conversation_id, tenant, time.time() - self._ttl_s),
        ).fetchone()
        if found is None:
            raise NotStored(conversation_id)
        return StoredConversation(conversation_id, found[0], _decode(found[1]))

    def _append(self, conversation_id: str, items: list[Item]) -> None:
        """Add items, unless the conversation would then have no room even alone: all else would have been evicted for
        it."""
        (last, count, size), = self._db.execute(
            "SELECT coalesce(max(place), 0), count(*), coalesce(sum(length(body)), 0) FROM items "
            "WHERE conversation = ?", (conversation_id,)
        )  # fmt: skip
        bodies = [_encode(item) for item in items]
        if count + len(items) > MAX_ITEMS or size + sum(map(len, bodies)) > self._max_bytes:
            raise TooLong(conversation_id)
        self._db.execute("UPDATE conversations SET used = ? WHERE id = ?", (time.time(), conversation_id))
        for place, (item, body) in enumerate(zip(items, bodies, strict=True), last + 1):
            self._db.execute("INSERT INTO items VALUES (?, ?, ?, ?)", (conversation_id, place, item["id"], body))

    # --- bounds -------------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Delete the records whose last use is longer ago than the time to live, a bounded number per call."""
        await self._run(lambda: self._remove_oldest(SWEEP_BATCH, before=time.time() - self._ttl_s))

    def _make_room(self) -> None:
        while self._db.used_bytes() > self._max_bytes:
            if not self._remove_oldest(EVICT_BATCH, before=float("inf"), tenant=self._largest_tenant()):
                return

    def _largest_tenant(self) -> str | None:
        """Return the tenant that holds the most; None if nothing is stored."""
        found = self._db.execute(
            "SELECT tenant FROM (SELECT tenant, length(body) + length(input) AS size FROM responses UNION ALL "
            "SELECT tenant, length(body) FROM items JOIN conversations ON conversations.id = conversation UNION ALL "
            "SELECT tenant, length(metadata) FROM conversations) GROUP BY tenant ORDER BY sum(size) DESC LIMIT 1"
        ).fetchone()
        return None if found is None else str(found[0])

    async def _note_use(self, table: str, names: list[str]) -> None:
        """Note that records were used now, if there is room for that: they are read all the same."""

        def note() -> None:
            values = [(time.time(), name) for name in names]
            with contextlib.suppress(sqlite3.Error), self._db.transaction():
                for value in values:
                    self._db.execute(f"UPDATE {table} SET used = ? WHERE id = ?", value)

        await self._quietly(note)

    async def _shrink(self) -> None:
        def shrink() -> None:
            with contextlib.suppress(sqlite3.Error):
                self._db.shrink(self._max_bytes)  # not possible inside a transaction

        await self._quietly(shrink)

    def _remove_oldest(self, most: int, *, before: float, tenant: str | None = None) -> bool:
        """Delete up to `most` responses and conversations, those used longest ago, of one tenant or of all. Returns
        whether there was one."""
        whose = "used < :before AND (:tenant IS NULL OR tenant = :tenant)"
        rows = self._db.execute(
            f"SELECT id, used FROM responses WHERE {whose} UNION ALL SELECT id, used FROM conversations "
            f"WHERE {whose} ORDER BY used LIMIT :limit",
            {"before": before, "limit": most, "tenant": tenant},
        ).fetchall()
        # The newest is about to be reported as stored, so it goes only if it alone is too large.
        for name, _ in rows[:-1] or rows:
            self._db.execute("DELETE FROM responses WHERE id = ?", (name,))
            self._remove_conversation(name)
        return bool(rows)

    def _remove_conversation(self, conversation_id: str) -> None:
        self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
        self._db.execute("DELETE FROM items WHERE conversation = ?", (conversation_id,))

    async def _delete(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread as `_run` does, and leave nothing of the deleted data in the files."""
        result = await self._run(work)
        await self._quietly(self._db.scrub)
        return result

    async def _quietly(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread, outside of a transaction, if the disk answers."""
        with contextlib.suppress(DiskAway):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.run, work)

    async def _run(self, work: Callable[[], T]) -> T:
        def call() -> T:
            try:
                with self._db.transaction():
                    return work()
            except sqlite3.Error as error:
                if self._db.recover(error):
                    raise NotStored(str(error)) from error
                raise not_reachable() from error

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._db.run, call)
        except DiskAway:
            raise not_reachable() from None


def not_reachable() -> ApiError:
    """Return the error, a 503, for responses and conversations whose store does not answer now."""
    return unavailable(
        "Responses and conversations cannot be reached right now.", code="unavailable", retry_after_s=5.0
    )
