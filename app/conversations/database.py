"""Opens a SQLite file, keeps its version and size, and replaces it when it is damaged."""

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from reprise.app.state_disk import DiskAway, StateDisk, long_call

T = TypeVar("T")
log = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0  # an operation that fails is said at most so often
APPLICATION_ID = 0x52505253  # "RPRS"
OPEN_TIMEOUT_S = 2.0  # for another process to let go of the file; less than the deadline of a disk, which does answer
BUSY_TIMEOUT_MS = 250  # short, because requests wait meanwhile
LOG_BYTES = 4 << 20  # the most that the write-ahead log may keep on disk between checkpoints
MAX_SET_ASIDE = 4  # damaged files that are kept; people may want to save something from them
REWRITE_S = 30.0  # between two attempts to write a deleted file anew

# UnicodeDecodeError: Python cannot decode SQLite's message when that quotes a damaged schema.
_TROUBLE = (sqlite3.Error, OSError, UnicodeDecodeError)

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
    """One SQLite database with one schema, in a private file or in memory. Used from one thread at a time, and from
    inside of `run` where the file's disk may hang.

    Opening never fails. A damaged file is set aside and replaced; only damage does that. A file that cannot be used for
    another reason (no room, no right, too many open files, another process) stays as it is: on a full disk it is still
    read, else the database is in memory. A file of another schema version is replaced. A file that is deleted while it
    is open is written anew. A file whose disk hangs is opened when that answers.
    """

    def __init__(
        self, *, path: Path | None, schema: str, version: int, added: str = "", disk: StateDisk | None = None
    ) -> None:
        """Open a file, or a database in memory if `path` is None. added: statements that make what files of this
        version may lack, such as CREATE TABLE IF NOT EXISTS. disk: the file's; None: no other file's."""
        self._path = path
        self._schema = schema
        self._added = added
        self._version = version
        self._file: os.stat_result | None = None  # the file to keep; None: the database is in memory
        self._rewrite_s = 0.0  # when a deleted file may be written anew
        self._is_open = False
        self.hides_file = False  # it is in memory in place of a file, in which something is
        self._told_s = float("-inf")  # when it was last said that an operation has failed
        self._disk = disk or StateDisk()
        self._thread = None if path is None else self._disk.thread(f"disk-{path.stem}")
        with suppress(DiskAway):
            self.run(lambda: None)

    @property
    def problem(self) -> str | None:
        """Why nothing new is stored in the file now, for people. None if it is stored, or if there is no file."""
        return None if self._path is None else self._disk.problem

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which uses this database, on the thread of the file's disk, and return or raise what it does.
        Raises DiskAway if the disk does not answer in time; `work` may then still be carried out later."""
        if self._thread is None:
            self._open_first()
            return work()

        def call() -> T:
            self._open_first()
            return work()

        return self._thread.run(call)

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """Execute a statement. Raises sqlite3.Error, which the caller passes to `recover`."""
        return self._db.execute(statement, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if time.monotonic() >= self._rewrite_s:
            self._keep_file()
        self._db.execute("BEGIN IMMEDIATE")
        before = self._db.total_changes
        try:
            yield
            self._db.execute("COMMIT")
            if self._file is not None and self._db.total_changes > before:  # else nothing was written there
                self._disk.took()
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def recover(self, error: sqlite3.Error) -> bool:
        """Handle an error that `execute` or `work` has raised: replace a damaged database by an empty one, and log
        other errors. Returns whether all that was in the database is gone."""
        if not _is_damage(error):
            self._disk.refused(error)
            if time.monotonic() - self._told_s > TOLD_EVERY_S:
                self._told_s = time.monotonic()
                log.warning("the database cannot do this now: %s", error)
            return False
        self._close()
        self._db = self._open_instead(error)
        return True

    def used_bytes(self) -> int:
        """Return the bytes of all pages in use, those of the indexes included. Raises sqlite3.Error."""
        pages, free = self._pragma("page_count"), self._pragma("freelist_count")
        if not 0 <= free <= pages:  # SQLite believes its header until it needs a free page
            error = sqlite3.DatabaseError("the count of free pages is damaged")
            raise _with_code(error, sqlite3.SQLITE_CORRUPT)
        return (pages - free) * self._pragma("page_size")

    def shrink(self, max_bytes: int) -> None:
        """Give free pages back to the file system until the file has at most `max_bytes`."""
        excess = self._pragma("page_count") - max_bytes // self._pragma("page_size")
        if excess > 0:
            # Each step of this statement frees one page, and `execute` would make a single one.
            self._db.executescript(f"PRAGMA incremental_vacuum({excess})")

    def scrub(self) -> None:
        """Remove deleted data from SQLite's write-ahead log too. To be called outside a transaction. It does nothing
        while another process reads."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file. If its disk does not answer, the disk's thread closes the file once the disk answers again,
        if ever."""

        def close() -> None:
            self._keep_file()
            self._close()

        with suppress(DiskAway):
            self.run(close)
        if self._path is not None:
            self._disk.note_file(self._path.name, is_used=True)  # nothing takes its place any more
        if self._thread is not None:
            self._thread.close()

    def _open_first(self) -> None:
        if not self._is_open:
            try:
                self._db = self._open(self._path)
            except _TROUBLE as error:
                self._db = self._open_instead(error)
            self._is_open = True

    def _close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    def _keep_file(self) -> None:
        """Write a new file with the contents of the open one, if that was deleted."""
        if self._path is None or self._file is None:
            return
        try:
            if os.path.samestat(self._path.stat(), self._file):
                return
        except (FileNotFoundError, NotADirectoryError):
            self._write_anew(self._path)
        except OSError:
            return  # it cannot be looked at now
        else:
            # Leave the new file as it is, but remove our log, which would be applied to it when it is opened.
            log.error("%s was replaced while it was open; until a restart, what is stored is lost", self._path)
            self._file = None
            with suppress(OSError):
                _remove_logs(self._path)

    def _write_anew(self, path: Path) -> None:
        log.warning("%s was deleted while it was open; it is written anew", path)
        copy = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            _make_private(copy)
            with long_call():
                self._db.execute("VACUUM INTO ?", (str(copy),))
            self._close()
            _remove_logs(path)  # they are still there if the directory is
            copy.replace(path)
            self._db = self._open(path)
        except _TROUBLE as error:
            self._rewrite_s = time.monotonic() + REWRITE_S
            log.error("%s cannot be written anew (%s); what it holds is lost with this process", path, error)
            with suppress(OSError):
                copy.unlink()

    def _open_instead(self, error: Exception) -> sqlite3.Connection:
        """Open what is possible after an error: a new file in place of a damaged one, the file itself without other
        processes, or a database in memory."""
        if not _is_damage(error):
            self._disk.refused(error)
        if self._path is not None and not _is_busy(error):  # a busy file is in order, and another process uses it
            try:
                if _is_damage(error):
                    aside = self._set_aside(self._path)
                    log.warning("%s is damaged (%s); it is set aside as %s", self._path, error, aside)
                    return self._open(self._path)
                db = self._open(self._path, alone=True)
                log.warning("%s can be read; as long as the cause lasts, not written: %s", self._path, error)
                return db
            except _TROUBLE as next_error:
                error = next_error
        log.warning("%s cannot be used (%s); its content is kept in memory only", self._path, error)
        if self._path is not None:
            self.hides_file = _has_content(self._path)
            self._disk.note_file(self._path.name, is_used=False)
        return self._open(None)

    @staticmethod
    def _set_aside(path: Path) -> Path:
        """Rename a damaged file, without overwriting another. Returns its new path. Raises OSError."""
        for number in range(1, MAX_SET_ASIDE + 1):
            aside = path.with_name(f"{path.name}.corrupt" + (f".{number}" if number > 1 else ""))
            if not os.path.lexists(aside):
                os.rename(path, aside)
                _remove_logs(path)
                return aside
        raise OSError(
            errno.EEXIST, f"it is damaged, as were {MAX_SET_ASIDE} before it; remove those that are set aside"
        )

    def _open(self, path: Path | None, *, alone: bool = False) -> sqlite3.Connection:
        """Open a file, or a database in memory. alone: no other process may open it; then no memory has to be shared
        through a file, for which a full disk has no room. Raises one of _TROUBLE."""
        if path is not None:
            self._file = _make_private(path)
        else:
            self._file = None
        db = sqlite3.connect(
            ":memory:" if path is None else path, timeout=OPEN_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        if self._thread is not None:
            # Closing writes. What nobody has closed is closed by the thread that destroys it: at the end of the program
            # by the main one, which a disk that hangs would keep from ending.
            self._thread.at_end[:] = [db.close]
        try:
            if alone:
                db.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
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
        return self._open(path, alone=alone)

    def _prepare_schema(self, db: sqlite3.Connection) -> bool:
        """Make the tables if there are none. Returns False if the tables are those of another version."""
        if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            db.executescript(
                f"BEGIN IMMEDIATE; {self._schema}; {self._added}; PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {self._version}; COMMIT;"
            )
            return True
        if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            error = sqlite3.DatabaseError("it is another program's database")
            raise _with_code(error, sqlite3.SQLITE_NOTADB)
        is_this = bool(db.execute("PRAGMA user_version").fetchone()[0] == self._version)
        if is_this:
            with suppress(sqlite3.OperationalError):  # on a full disk the rest is still read
                db.executescript(self._added)
        return is_this


def _is_damage(error: Exception) -> bool:
    """Return whether the file itself is at fault, and not the room, the rights or the device that it needs."""
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return isinstance(error, IsADirectoryError | UnicodeDecodeError) or _code(error) in damage


def _is_busy(error: Exception) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: Exception) -> int:
    """Return the primary result code, which is the low byte of what SQLite reports."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _with_code(error: sqlite3.DatabaseError, code: int) -> sqlite3.DatabaseError:
    """Give an error a result code, as if SQLite had found it."""
    error.sqlite_errorcode = code
    return error


def _make_private(path: Path) -> os.stat_result:
    """Create the file if it is missing, and let only its owner open it. SQLite gives its log files the same mode.
    Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be looked at


def _remove_logs(path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
