"""Stores an index of the disk tier in SQLite, so that a start need not read every record.

The records are authoritative: a wrong or missing row is rebuilt from the header of its file. Every row has a MAC, like
every header, because a row written by others could name blocks in the wrong place. Rows of extents are written in
batches, since one alone takes 0.3 ms after a turn; after a crash, the headers of a few extents must be read. What is
recorded of a session after its last extent exists only here, so it is written at once.
"""

import hmac
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from reprise.cache.blocks.stored import ExtentInfo, SessionRecord
from reprise.cache.storage.extent_format import MAC_BYTES
from reprise.cache.storage.io_threads import Beat

SCHEMA_VERSION = 2  # version 1 had digests without a key
_EXTENTS_PER_BATCH = 32  # extents per batch
_SCHEMA = """
CREATE TABLE extents (extent_id INTEGER PRIMARY KEY, info BLOB NOT NULL, mac BLOB NOT NULL);
CREATE TABLE sessions (tenant TEXT, salt TEXT, session_id TEXT, stamp INTEGER NOT NULL, record BLOB NOT NULL,
                       mac BLOB NOT NULL, PRIMARY KEY (tenant, salt, session_id));
"""
_PUT_EXTENT = "INSERT OR REPLACE INTO extents VALUES (?, ?, ?)"
_PUT_SESSION = """
INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
SET stamp = excluded.stamp, record = excluded.record, mac = excluded.mac WHERE excluded.stamp > stamp
"""
# Primary error codes about the disk's room, permissions or device; the file itself may be intact.
_NO_DAMAGE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
log = logging.getLogger(__name__)
Row = TypeVar("Row", ExtentInfo, SessionRecord)


class DiskIndex:
    """An index of the extents of one fingerprint and of their sessions' records, for the ExtentStore. Thread-safe.
    Methods raise sqlite3.Error. A `stamp` orders the records of a session; extent ids come from the same sequence."""

    def __init__(self, *, path: Path, key: bytes) -> None:
        """Set up. key: from `reprise.cache.storage.extent_format.record_key`."""
        self._path, self._key = path, key
        self._aside = path.with_suffix(".bad")
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._extents: list[tuple[object, ...]] = []  # rows to be written with the next change
        self._sessions: list[tuple[object, ...]] = []  # rows of these extents' sessions

    def open(self, beat: Beat) -> tuple[dict[int, ExtentInfo], dict[tuple[str, str, str], tuple[int, SessionRecord]]]:
        """Return all intact rows: extents by id, and sessions by name with their stamps. An index that is damaged or of
        another schema is renamed and replaced by an empty one. An index that cannot be written, for example because the
        disk is full, is kept, and read if possible. beat: called between the steps, so that a deadline applies to
        each."""
        try:
            return self._load(beat)
        except (sqlite3.Error, UnicodeError) as error:
            beat()  # not raised because the deadline has passed
            self.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_DAMAGE and not self._path.is_dir():
                log.warning("the disk tier's index cannot be written: %s", error)
                return self._load(beat, alone=True)
            log.warning("the disk tier's index is set aside and rebuilt from the records: %s", error)
            self._move_aside()
            return self._load(beat)

    def make_again(self, beat: Beat) -> None:
        """Start with an empty index, because its file was deleted. beat: called between the steps, so that a deadline
        applies to each."""
        self.close()
        self._move_aside()  # SQLite would apply the remaining log to the new file
        self._load(beat)

    def is_there(self) -> bool:
        """Return whether the open file still exists under its name."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def add(self, info: ExtentInfo, *, stamp: int) -> None:
        """Add a row for the extent, now or, in one batch with others, with a later change. Its session record becomes
        the session's newest, unless the index has one with a later stamp, or the extent's record is empty. After an
        error the rows of the batch are lost, and their extents are known only by their headers."""
        data = msgspec.msgpack.encode(info)
        with self._lock:
            self._extents.append((info.extent_id, data, self._mac(info.extent_id, data)))
            if info.session.context:  # else it is a first turn that has not ended: there is no session yet
                self._sessions.append(self._session_row(info.session, stamp))
            if len(self._extents) >= _EXTENTS_PER_BATCH:
                with self._connection() as db:
                    self._catch_up(db)

    def remove(self, extent_ids: Iterable[int]) -> None:
        with self._lock, self._connection() as db:
            self._catch_up(db)
            db.executemany("DELETE FROM extents WHERE extent_id = ?", [(extent_id,) for extent_id in extent_ids])

    def put_session(self, record: SessionRecord, *, stamp: int) -> None:
        with self._lock, self._connection() as db:
            self._catch_up(db)
            db.execute(_PUT_SESSION, self._session_row(record, stamp))

    def delete_sessions(self, names: Iterable[tuple[str, str, str]]) -> None:
        """Delete sessions by (tenant, salt, session id). Their bytes are erased from the files of the index too."""
        with self._lock:
            with self._connection() as db:
                self._catch_up(db)
                where = "tenant = ? AND salt = ? AND session_id = ?"
                db.executemany(f"DELETE FROM sessions WHERE {where}", names)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # erases them from the log too
            _remove(self._aside)

    def close(self) -> None:
        with self._lock:
            if self._db is None:
                return
            try:
                if self._extents:
                    with self._db as db:
                        self._catch_up(db)
            except sqlite3.Error as error:
                log.warning("some extents are not in the index and will be found by their headers: %s", error)
            self._db.close()
            self._db = None

    def _catch_up(self, db: sqlite3.Connection) -> None:
        """Write the batched rows. Called at the beginning of a transaction, whose own changes may be about the same
        rows."""
        extents, self._extents = self._extents, []
        sessions, self._sessions = self._sessions, []
        db.executemany(_PUT_EXTENT, extents)
        db.executemany(_PUT_SESSION, sessions)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.OperationalError("the index is closed")
        return self._db

    def _load(
        self, beat: Beat, *, alone: bool = False
    ) -> tuple[dict[int, ExtentInfo], dict[tuple[str, str, str], tuple[int, SessionRecord]]]:
        """Read all rows. alone: allow no other connection, which avoids the shared-memory file."""
        db = self._db = sqlite3.connect(self._path, timeout=1.0, check_same_thread=False)
        self._path.chmod(0o600)
        self._inode = self._path.stat().st_ino
        if alone:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"schema {version}, not {SCHEMA_VERSION}")
        db.set_progress_handler(beat, 100_000)  # loading a large index is slow, but the device does not hang
        (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        extents = {}
        for extent_id, data, mac in db.execute("SELECT extent_id, info, mac FROM extents"):
            beat()
            info = self._decode(extent_id, data, mac, ExtentInfo)
            if info is not None and info.extent_id == extent_id:
                extents[extent_id] = info
        sessions = {}
        for stamp, data, mac in db.execute("SELECT stamp, record, mac FROM sessions"):
            record = self._decode(stamp, data, mac, SessionRecord)
            if record is not None and record.context:
                sessions[record.names] = (stamp, record)
        db.set_progress_handler(None, 0)
        return extents, sessions

    def _move_aside(self) -> None:
        """Rename the index, replacing an index renamed before. Delete its log, which SQLite would apply to the new
        file."""
        for suffix in ("-wal", "-shm"):
            _remove(self._path.with_name(self._path.name + suffix))
        _remove(self._aside)
        if self._path.exists():
            self._path.replace(self._aside)

    def _session_row(self, record: SessionRecord, stamp: int) -> tuple[object, ...]:
        data = msgspec.msgpack.encode(record)
        return (*record.names, stamp, data, self._mac(stamp, data))

    def _mac(self, number: int, data: bytes) -> bytes:
        # Detects damage too: SQLite has no checksums, so a flipped bit in a row would go unnoticed.
        return blake2b(
            number.to_bytes(8, "little") + data, key=self._key, digest_size=MAC_BYTES, person=b"index row"
        ).digest()

    def _decode(self, number: object, data: object, mac: object, kind: type[Row]) -> Row | None:
        if not isinstance(number, int) or not isinstance(data, bytes) or not 0 <= number < 1 << 63:
            return None
        if not isinstance(mac, bytes) or not hmac.compare_digest(mac, self._mac(number, data)):
            return None
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (msgspec.DecodeError, ValueError):
            return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
