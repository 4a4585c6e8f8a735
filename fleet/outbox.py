"""Stores on disk the sessions whose last turn the directory has not been told of, until it has.

An entry has the session's name, the epoch and turn at which it was claimed, and the result of its last turn. The
messages and ids are not in it: they are read from the transcripts when the entry is sent. A later turn of the session
replaces its entry.
"""

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from reprise.app.conversations.database import Database
from reprise.app.state_disk import DiskAway, StateDisk

T = TypeVar("T")
_SCHEMA = """
CREATE TABLE waiting (name BLOB PRIMARY KEY, entry BLOB NOT NULL, place INTEGER NOT NULL);
CREATE INDEX waiting_by_place ON waiting (place)
"""
SCHEMA_VERSION = 1
MAX_TO_FORGET = 10_000  # deleted sessions whose entries are taken out when the disk answers


class Unsent(msgspec.Struct, frozen=True, kw_only=True):
    """A session whose last turn, or newest head (the record by which another replica can take it over), has not been
    committed."""

    tenant: str
    session_id: str
    salt: str
    fingerprint: str
    since: int  # see `reprise.fleet.records.Commit`
    base_turn: int
    exported: int  # id of the recorded answer up to which the directory has all
    tokens: int
    ttl_s: float | None
    head: bytes


class Outbox:
    """A queue of sessions whose last turn or newest head the directory has not recorded yet, used from one thread at a
    time. If its file fails, it works in memory or not at all; nothing raises. While the file's disk does not answer,
    nothing is put in, found or removed."""

    def __init__(self, *, path: Path | None, max_bytes: int, disk: StateDisk | None = None) -> None:
        """Open the file. path: None keeps the queue in memory. max_bytes: of the file; when it is full the oldest
        entries are dropped, and the directory is never told of their turns. disk: the file's."""
        self.dropped = 0  # entries that had no room
        self.waiting = 0  # entries; may be read on any thread
        self._to_forget: list[bytes] = []  # beginnings of the names of deleted sessions' entries, which are still there
        self._is_counted = False  # `waiting` says how many there are in the file
        self._db = Database(path=path, schema=_SCHEMA, version=SCHEMA_VERSION, disk=disk)
        self._max_bytes = max_bytes
        self._in_time(self._count, None)

    def put(self, entry: Unsent) -> None:
        """Add an entry at the end, instead of the session's earlier one."""
        try:
            self._run(partial(self._put, entry))
        except DiskAway as error:
            if not error.is_under_way:  # else it counts what becomes of it, when it ends
                self.dropped += 1

    def _put(self, entry: Unsent) -> None:
        """Do what `put` does, and count the entries that had no room."""
        if _name(entry.tenant, entry.session_id, "") in self._to_forget:  # with whose entries it would be forgotten
            self.dropped += 1
            return
        dropped = 0
        name = _name(entry.tenant, entry.session_id, entry.salt)
        try:
            with self._db.transaction():
                self._db.execute(
                    "INSERT OR REPLACE INTO waiting (name, entry, place) VALUES (?, ?, (SELECT coalesce(max(place), 0)"
                    " + 1 FROM waiting))",
                    (name, msgspec.msgpack.encode(entry)),
                )
                while self._db.used_bytes() > self._max_bytes:
                    oldest = self._db.execute("SELECT name FROM waiting ORDER BY place LIMIT 1").fetchone()
                    if oldest is None:
                        break
                    self._db.execute("DELETE FROM waiting WHERE name = ?", oldest)
                    dropped += 1
        except sqlite3.Error as error:
            self._db.recover(error)
            dropped += 1
        self.dropped += dropped
        self._count()

    def first(self, count: int) -> list[Unsent]:
        """Return the `count` entries that have waited longest, without removing them. An entry that cannot be decoded
        is removed."""
        return self._in_time(partial(self._first, count), [])

    def _first(self, count: int) -> list[Unsent]:
        if not self._is_counted:  # the disk did not answer at the start
            self._count()
        try:
            rows = self._db.execute("SELECT name, entry FROM waiting ORDER BY place LIMIT ?", (count,)).fetchall()
            entries = []
            for name, data in rows:
                try:
                    entries.append(msgspec.msgpack.decode(data, type=Unsent))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self._db.execute("DELETE FROM waiting WHERE name = ?", (name,))
                    self._count()
            return entries
        except sqlite3.Error as error:
            self._db.recover(error)
            self._count()
            return []

    def remove(self, tenant: str, session_id: str, salt: str) -> None:
        """Remove a session's entry, if it has one."""
        self._in_time(partial(self._delete, "name = ?", _name(tenant, session_id, salt)), None)

    def forget(self, tenant: str, session_id: str) -> None:
        """Remove the entries of a deleted session, with any salt, and erase all removed entries from the files. If the
        disk does not answer or has no room, that is done at a later call, once it does."""
        if len(self._to_forget) < MAX_TO_FORGET:
            self._to_forget.append(_name(tenant, session_id, ""))
        self._in_time(lambda: None, None)

    def close(self) -> None:
        self._db.close()

    def _in_time(self, work: Callable[[], T], instead: T) -> T:
        """Return what `work` does, as `_run`; `instead` if the disk does not answer."""
        try:
            return self._run(work)
        except DiskAway:
            return instead

    def _run(self, work: Callable[[], T]) -> T:
        """Forget what is to be forgotten, and return what `work` does then. Raises DiskAway."""

        def call() -> T:
            if self._to_forget:
                for start in list(self._to_forget):
                    if not self._delete("substr(name, 1, ?) = ?", len(start), start):
                        break
                    self._to_forget.remove(start)
                self._db.scrub()
            return work()

        return self._db.run(call)

    def _delete(self, where: str, *values: bytes | int) -> bool:
        """Delete entries. Returns whether they are gone."""
        are_gone = True
        try:
            with self._db.transaction():
                self._db.execute(f"DELETE FROM waiting WHERE {where}", values)
        except sqlite3.Error as error:
            are_gone = self._db.recover(error)
        self._count()
        return are_gone

    def _count(self) -> None:
        try:
            self.waiting = self._db.execute("SELECT count(*) FROM waiting").fetchone()[0]
            self._is_counted = True
        except sqlite3.Error as error:
            if self._db.recover(error):
                self.waiting = 0


def _name(tenant: str, session_id: str, salt: str) -> bytes:
    """Return a key of the three names, which begins with the first two, and which no other session has."""
    fields = (tenant, session_id, salt)
    return b"".join(
        len(data := field.encode("utf-8", "surrogatepass")).to_bytes(4, "big") + data for field in fields[:2]
    ) + (fields[2].encode("utf-8", "surrogatepass"))
