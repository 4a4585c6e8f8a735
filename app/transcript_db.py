"""The SQLite file behind the transcripts: opened, versioned, bounded, and replaced when it is damaged."""

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

APPLICATION_ID = 0x52505253  # "RPRS"
OPEN_TIMEOUT_S = 5.0
BUSY_TIMEOUT_MS = 250  # requests wait meanwhile
LOG_BYTES = 4 << 20  # what the write-ahead log may keep on disk between checkpoints

_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",  # a power cut may lose the last turns, never the consistency
    f"journal_size_limit = {LOG_BYTES}",
    "secure_delete = ON",  # what is deleted is overwritten
    "cell_size_check = ON",
    "trusted_schema = OFF",
    f"busy_timeout = {BUSY_TIMEOUT_MS}",
)


class Database:
    """One SQLite database with one schema, in a private file or in memory. Used from one thread at a time.

    Opening never fails: a file that cannot be read is set aside and replaced, and where that is impossible, or another
    process holds the file, the database is in memory. A file of another schema version is replaced.
    """

    def __init__(self, *, path: Path | None, schema: str, version: int) -> None:
        self._path = path
        self._schema = schema
        self._version = version
        try:
            self._db = self._open(path)
        except (sqlite3.Error, OSError) as error:
            self._db = self._open_anew(error)

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """Raises sqlite3.Error; hand it to `recover`."""
        return self._db.execute(statement, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def recover(self, error: sqlite3.Error) -> bool:
        """After an error in use: replace a damaged database; True if all that was in it is gone."""
        if _code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            log.warning("the database cannot do this now: %s", error)
            return False
        self.close()
        self._db = self._open_anew(error)
        return True

    def used_bytes(self) -> int:
        """Pages in use, those of the indexes included. Raises sqlite3.Error."""
        pages, free = self._pragma("page_count"), self._pragma("freelist_count")
        if not 0 <= free <= pages:  # SQLite believes its header until it needs a free page
            error = sqlite3.DatabaseError("the count of free pages is damaged")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        return (pages - free) * self._pragma("page_size")

    def shrink(self, max_bytes: int) -> None:
        """Give free pages back to the file system until the file is no larger than that."""
        excess = self._pragma("page_count") - max_bytes // self._pragma("page_size")
        if excess > 0:
            # Each step of this statement frees one page, and `execute` would make a single one.
            self._db.executescript(f"PRAGMA incremental_vacuum({excess})")

    def scrub(self) -> None:
        """What was deleted leaves the write-ahead log too, outside a transaction. Not while another process reads."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    def _open_anew(self, error: Exception) -> sqlite3.Connection:
        busy = _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        if self._path is not None and not busy:  # a busy file is well, and another process's
            aside = self._path.with_name(self._path.name + ".corrupt")
            log.warning("%s is unreadable (%s); it is set aside as %s", self._path, error, aside)
            try:
                os.replace(self._path, aside)
                _remove_logs(self._path)
                return self._open(self._path)
            except (sqlite3.Error, OSError) as next_error:
                error = next_error
        log.warning("%s cannot be used (%s); its content is kept in memory only", self._path, error)
        return self._open(None)

    def _open(self, path: Path | None) -> sqlite3.Connection:
        """Raises sqlite3.Error or OSError."""
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its log files the mode of the database.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)
        db = sqlite3.connect(
            ":memory:" if path is None else path, timeout=OPEN_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            if db.execute("PRAGMA page_count").fetchone()[0] == 0:
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # possible in an empty file only, and a write in others
            for pragma in _PRAGMAS:
                db.execute(f"PRAGMA {pragma}").fetchall()
            if self._prepare_schema(db):
                return db
        except BaseException:
            db.close()
            raise
        db.close()
        assert path is not None  # a database in memory begins empty
        log.warning("%s is of another version than %d; it is begun anew", path, self._version)
        path.unlink()
        _remove_logs(path)
        return self._open(path)

    def _prepare_schema(self, db: sqlite3.Connection) -> bool:
        """False if the tables are those of another version."""
        if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            db.executescript(
                f"BEGIN IMMEDIATE; {self._schema}; PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {self._version}; COMMIT;"
            )
            return True
        if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise sqlite3.DatabaseError("it is another program's database")
        return bool(db.execute("PRAGMA user_version").fetchone()[0] == self._version)


def _code(error: Exception) -> int:
    """The primary result code: the low byte of what SQLite reports."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _remove_logs(path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
