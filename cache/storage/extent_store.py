"""Implements the disk tier: one file per extent, every byte verified on reading, every blocking call with a deadline.

    DIRECTORY/kv/lock                           held while a server runs here; names the server
    DIRECTORY/kv/<fingerprint>/index.sqlite     see cache/storage/index.py
    DIRECTORY/kv/<fingerprint>/<xx>/<id>.kv     see cache/storage/extent_format.py; xx are the id's last two digits

Directories of other fingerprints (models or kinds of KV) count towards the cap and stay until their room is needed, so
starting with another model by mistake loses nothing.
"""

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from reprise.cache.storage.device_question import NO_ROOM, ask_device
from reprise.cache.storage.directory_lock import DirectoryLock, DirectoryLocked
from reprise.cache.storage.disk_watch import CLOSE_S, DiskWatch
from reprise.cache.storage.errors import BlockMissing, Problem, TierFailed, TierFull
from reprise.cache.storage.extent_file import remove_extent
from reprise.cache.storage.extent_format import MAX_EXTENT_ID, ExtentForm
from reprise.cache.storage.extent_opener import READ_THREADS, ExtentOpener
from reprise.cache.storage.extent_reader import ExtentReader, flat
from reprise.cache.storage.extent_writer import WRITE_THREADS, ExtentWriter
from reprise.cache.storage.index import DiskIndex
from reprise.cache.storage.io_threads import Beat, IoDeadline, IoThreads
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.recovery import recover
from reprise.cache.storage.shards import Shards
from reprise.cache.storage.space import DiskSpace
from reprise.cache.storage.thread_priority import WRITING
from reprise.cache.storage.throttle import Throttle

log = logging.getLogger(__name__)
T = TypeVar("T")
Kept = tuple[list[ExtentInfo], list[SessionRecord]]
"""The contents of a directory: extents in order of writing, and the last record of each session."""


class ExtentStore:
    """The disk tier: stores, reads and deletes extents. Thread-safe: between `open` and `close`, every method may be
    called from any thread, and returns or raises within the deadlines of its steps (plus the time that the bandwidth
    caps demand).

    Source: AttentionStore (arXiv 2403.19708) §3.3, the disk below DRAM. Unlike the paper's, it outlives the process.
    """

    name = "disk"

    def __init__(
        self,
        *,
        directory: Path,
        form: ExtentForm,
        capacity_bytes: int,
        min_free_bytes: int,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        deadline_s: float,
        owner: str,
        measure: Callable[[], int] | None = None,
    ) -> None:
        """Set up. min_free_bytes: always left free on the file system. read_bytes_per_s, write_bytes_per_s: caps; 0:
        none. owner: name of this process, for the error messages of others while the directory is locked. measure:
        returns a lower cap than `capacity_bytes`, or raises OSError; it is called when the directory is opened. None:
        there is no lower one."""
        self.capacity_bytes = capacity_bytes
        self._measure = measure
        self._num_layers = len(form.sizes.raw)
        self._codes = form.sizes.coded is not None
        self._directory = directory
        self._deadline_s = deadline_s
        self._held = DirectoryLock(directory, owner)
        self._shards = Shards(directory / "kv", form.fingerprint)
        self._space = DiskSpace(
            root=self._shards.root,
            own=self._shards.own,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
        )
        self._index = DiskIndex(path=self._shards.own / "index.sqlite", key=form.key)
        self._log = RareLog()
        self._opener = ExtentOpener(
            shards=self._shards,
            form=form,
            throttle=Throttle(bytes_per_s=read_bytes_per_s, clock=time.monotonic, sleep=time.sleep),
            rare_log=self._log,
            note_read=self._note_read,
        )
        self._writer = ExtentWriter(
            shards=self._shards,
            space=self._space,
            form=form,
            throttle=Throttle(bytes_per_s=write_bytes_per_s, clock=time.monotonic, sleep=time.sleep),
        )
        self._reads: IoThreads | None = None
        self._writes: IoThreads | None = None  # also deletes and updates the index
        self._watch: DiskWatch[Kept] | None = None
        self._making = threading.Lock()  # held while the directory is made again; taken before `_lock`

        self._lock = threading.Lock()  # guards what follows; never held during I/O
        self._last_id = 0
        self._lost: list[int] = []  # extents found to be deleted by another process
        # Extents that cannot be used -> why: files without a valid record (deleted if readable), rows without a file.
        self.useless: dict[int, Problem] = {}

    def open(self) -> Kept:
        """Take the lock, delete what a crash left, and return what is stored. That may be more than capacity_bytes, if
        the cap was lowered; the caller then deletes extents down to it. Each step has a deadline, all together have
        none. For tools: a server uses `open_in_time`. Raises DirectoryLocked, OSError."""
        self._start_threads(lambda _: None)
        assert self._writes is not None
        try:
            return self._writes.call(self._recover, late=self._release)
        except BaseException as error:
            if isinstance(error, IoDeadline):
                self._close_threads()
                raise OSError(errno.ETIMEDOUT, "the disk does not answer", str(self._directory)) from error
            self.close()
            if isinstance(error, sqlite3.Error):
                raise OSError(errno.EIO, f"the index cannot be used: {error}", str(self._directory)) from error
            raise

    def open_in_time(self, patience_s: float) -> Kept | None:
        """Open as `open` does, but wait no longer than `patience_s` seconds in all. Returns what is stored. If the disk
        fails or does not answer in time, returns None, and the disk is opened later, as soon as it answers.

        Once it is open, it is given up when it misses a deadline or when reads fail one after the other. Then every
        call fails at once until the disk answers again. `listen` reports all these changes, and `problem` says why the
        disk is not used. Raises DirectoryLocked or OSError if only a person can remove the cause
        (`reprise.cache.storage.disk_watch.is_mistake`).
        """
        watch = self._watch = DiskWatch(
            name=f"the disk tier in {self._directory}",
            take=self._take,
            ask=self._ask,
            release=self._release,
            switch=self._switch,
        )
        self._start_threads(watch.give_up)
        try:
            return watch.begin(patience_s)
        except BaseException:
            self.close()
            raise

    def listen(self, tell: Callable[[str | None, Kept | None], None]) -> None:
        """Call `tell` at every change: with (problem, None) when the disk is given up, or is not used for another
        reason than before, (None, what is stored) when it is opened for the first time, and (None, None) when it is
        used again. It may be called by any thread. A store that was opened by `open` never calls it."""
        if self._watch is not None:
            self._watch.listen(tell)

    @property
    def problem(self) -> str | None:
        """The reason why the disk is not used now, as a text for people; None while it is used."""
        return None if self._watch is None else self._watch.problem

    def _start_threads(self, on_late: Callable[[str], None]) -> None:
        deadline_s = self._deadline_s
        self._reads = IoThreads(
            name="disk-read", num_threads=READ_THREADS, deadline_s=deadline_s, lower_by=0, on_late=on_late
        )
        self._writes = IoThreads(
            name="disk-write", num_threads=WRITE_THREADS, deadline_s=deadline_s, lower_by=WRITING, on_late=on_late
        )

    def _note_read(self, problem: str | None) -> None:
        if self._watch is not None:
            self._watch.note_read(problem)

    def _switch(self, problem: str | None) -> None:
        for threads in (self._reads, self._writes):
            if threads is not None:
                threads.refuse(problem)

    def close(self) -> None:
        """Wait for running operations up to their deadlines, but not while the disk is given up; then release the
        directory. If an operation hangs in it, the lock stays taken until the process ends."""
        if self._writes is None:
            return
        is_used, has_ended = self.problem is None, self._watch is None or self._watch.close()
        if self._close_threads() and has_ended:
            deadline_s = self._deadline_s if is_used else min(CLOSE_S, self._deadline_s)
            last = IoThreads(
                name="disk-close", num_threads=1, deadline_s=deadline_s, lower_by=0, on_late=lambda _: None
            )
            with contextlib.suppress(IoDeadline, OSError, sqlite3.Error):
                last.call(lambda _: self._release(), late=lambda: None)
            last.close()
        else:
            log.warning("closing the disk tier while an operation hangs in %s", self._directory)

    def _close_threads(self) -> bool:
        """Close the threads. Returns whether all have ended."""
        pools, self._reads, self._writes = (self._reads, self._writes), None, None
        ended = [pool.close() for pool in pools if pool is not None]
        return all(ended)

    def used_bytes(self) -> int:
        """Return the bytes of all extent files on disk, including files being written and those of other models."""
        return self._space.used_bytes

    def write(
        self,
        session: SessionRecord,
        blocks: Sequence[StoredBlock],
        checksums: bytes,
        segments: Callable[[int], Sequence[memoryview]],
        extent_id: int | None = None,
        is_coded: bool = False,
    ) -> ExtentInfo:
        """Store the blocks as one extent, all or nothing. The extent is durable on return. Raises TierFull (the cap,
        the file system's floor, no space) or TierFailed (read-only, broken, deadline, or more than a record may hold).
        No answer to a client depends on success.

        extent_id: None for a new one, or the id that the store of another rank has chosen for its part of the same
        blocks. is_coded: a codec has compressed these segments. checksums: of all segments, layer by layer
        (`reprise.cache.storage.extent_format.checksum`); they are compared with the bytes only on reading.
        segments(layer): the bytes of the layer's blocks in order, in any number of pieces. They are read until this
        returns or raises (after a missed deadline perhaps later, but the result is discarded).
        """
        views = [[flat(view) for view in segments(layer)] for layer in range(self._num_layers)]
        new_id = self._new_id(is_coded) if extent_id is None else self._known_id(extent_id)
        try:
            extent = self._writer.encode(new_id, session, blocks, checksums, views)
        except ValueError as error:
            raise TierFailed(f"write: {error}", reason="format") from error

        def store(beat: Beat) -> float:
            self._ensure_directory(beat)
            due = self._writer.write(extent, beat)
            beat()
            try:
                self._index.add(extent.info, stamp=new_id)
            except sqlite3.Error as error:
                problem = "extent %016x and some before it are not in the index and will be found by their headers: %s"
                self._log.warn("index", problem, new_id, error)
            return due

        due = self._do("write", store, late=partial(self._forget, [new_id]))
        self._writer.wait(due)
        return extent.info

    def reader(self, extent_id: int) -> ExtentReader:
        """Open an extent and verify its header. Raises BlockMissing."""
        return self._reader(extent_id, trust_cached=True)

    def delete(self, *extent_ids: int) -> None:
        """Delete extents; their bytes are gone on return, but open readers may continue. Unknown ids are ignored.
        Raises TierFailed; some of the first extents may be gone then."""
        here = [extent_id for extent_id in extent_ids if extent_id in self._space]
        if here:
            self._do("delete", lambda beat: self._forget(here, beat))

    def put_session(self, record: SessionRecord) -> None:
        """Store a session's record. The newest record of a session wins, whether stored here or with an extent. Raises
        TierFailed."""
        stamp = self._new_id()

        def put(beat: Beat) -> None:
            self._ensure_directory(beat)
            self._index.put_session(record, stamp=stamp)

        self._do("put_session", put)

    def delete_sessions(self, *names: tuple[str, str, str]) -> None:
        """Delete the records of sessions (tenant, salt, session id) whose extents are deleted already. On return all
        these deletions survive a power failure, which is most of the cost; deleting many sessions at once costs little
        more than one. Raises TierFailed."""

        def forget(beat: Beat) -> None:
            self._index.delete_sessions(names)
            self._shards.sync_deletions(beat)

        self._do("delete_sessions", forget)

    def verify(self) -> Iterator[tuple[int, Problem | None]]:
        """Read and verify everything. Yields (extent id, None or why it cannot be used)."""
        for extent_id in self._space.extent_ids():
            try:
                with self._reader(extent_id, trust_cached=False) as reader:
                    reader.check()
                yield extent_id, None
            except BlockMissing as missing:
                yield extent_id, Problem(missing.reason, str(missing))

    def take_lost(self) -> list[int]:
        """Return the ids of extents that were found to be deleted by another process, each once."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def _do(self, what: str, work: Callable[[Beat], T], late: Callable[[], None] = lambda: None) -> T:
        threads = self._writes
        if threads is None:
            raise TierFailed("the disk tier is closed", reason="io")
        try:
            return threads.call(work, late)
        except IoDeadline as error:
            raise TierFailed(f"{what}: {error}", reason="deadline") from error
        except MemoryError as error:
            raise TierFailed(f"{what}: no memory", reason="memory") from error
        except OSError as error:
            if error.errno in NO_ROOM:
                raise TierFull(f"{what}: {error}") from error
            raise TierFailed(f"{what}: {error}", reason="io") from error
        except DirectoryLocked as error:
            raise TierFailed(f"{what}: {error}", reason="io") from error
        except sqlite3.Error as error:
            raise TierFailed(f"{what}: the index failed: {error}", reason="io") from error

    def _reader(self, extent_id: int, *, trust_cached: bool) -> ExtentReader:
        if extent_id not in self._space:
            raise BlockMissing(f"extent {extent_id:016x} is not here", reason="missing", extent_id=extent_id)
        threads = self._reads
        if threads is None:
            raise BlockMissing("the disk tier is closed", reason="io")
        try:
            return self._opener.open(extent_id, threads, trust_cached=trust_cached)
        except BlockMissing as missing:
            if missing.reason == "missing" and self._watch is not None and self._has_left(threads):
                raise BlockMissing(str(missing), reason="deadline") from missing  # it may come back with its disk
            raise

    def _has_left(self, threads: IoThreads) -> bool:
        """Return whether a file is missing because its whole file system is. The disk is then given up."""
        try:
            has_left = threads.call(lambda _: self._shards.has_left(), late=lambda: None)
        except IoDeadline:
            return True
        if has_left and self._watch is not None:
            self._watch.give_up(f"the file system of {self._directory} is gone")
        return has_left

    def _new_id(self, is_coded: bool = False) -> int:
        # Ids come from the clock, so that they are never reused even if index and records are lost, and exceed the last
        # id, so that they increase even if the clock does not.
        with self._lock:
            self._last_id = max(self._last_id + 1, time.time_ns())
            if self._codes and self._last_id % 2 != is_coded:  # `reprise.cache.blocks.stored.is_coded`
                self._last_id += 1
            if self._last_id > MAX_EXTENT_ID:
                raise TierFailed("no extent ids are left: what does the clock say?", reason="format")
            return self._last_id

    def _known_id(self, extent_id: int) -> int:
        """Use an id for a new extent that was chosen elsewhere. Ids that this store chooses are larger from now on.
        Raises TierFailed if the id is in use."""
        if extent_id in self._space or not 0 < extent_id <= MAX_EXTENT_ID:
            raise TierFailed(f"write: the id {extent_id:016x} cannot be given to an extent", reason="format")
        with self._lock:
            self._last_id = max(self._last_id, extent_id)
        return extent_id

    def _remove(self, extent_id: int) -> None:
        remove_extent(self._shards.path(extent_id))
        self._opener.forget(extent_id)
        self._space.release(extent_id)
        self._shards.note_deletion(extent_id)

    def _forget(self, extent_ids: Sequence[int], beat: Beat = lambda: None) -> None:
        gone: list[int] = []
        try:
            for extent_id in extent_ids:
                beat()
                self._remove(extent_id)
                gone.append(extent_id)
        finally:  # on any failure, the extents before it are gone and will not be asked for again
            try:
                self._index.remove(gone)
            except sqlite3.Error as error:
                ids = ", ".join(f"{extent_id:016x}" for extent_id in gone[:3])
                self._log.warn("index", "the index still names extent %s, which is gone: %s", ids, error)

    def _ensure_directory(self, beat: Beat) -> None:
        """Make the directory again if it was deleted under the running server. Its contents are not restored: they were
        meant to be deleted. The lock is taken again too, because the next server would otherwise create and lock
        another file. Raises DirectoryLocked, OSError."""
        with self._making:
            has_lock = self._held.is_held
            if has_lock and self._index.is_there():
                return
            beat()
            if self._watch is not None and self._shards.has_left():
                problem = f"the file system of {self._directory} is gone"
                self._watch.give_up(problem)
                raise OSError(errno.ENODEV, problem)
            lost = "%s was deleted while the server runs; its contents are lost and it is made again"
            log.warning(lost, self._shards.own)
            self._shards.make_parents()
            if not has_lock:
                self._held.take()
            self._shards.make_all(beat)
            self._index.make_again(beat)
            gone = [one for one in self._space.extent_ids() if not os.path.exists(self._shards.path(one))]
            for extent_id in gone:
                self._opener.forget(extent_id)
            self._space.release(*gone)
            with self._lock:
                self._lost += gone

    def _take(self, beat: Beat) -> Kept:
        """Recover as the watch does it: again and again. If it fails, nothing stays open, above all no lock, which
        would keep the next attempt out. Called in the watch's thread."""
        try:
            return self._recover(beat)
        except BaseException:
            with contextlib.suppress(OSError, sqlite3.Error):
                self._release()
            raise

    def _recover(self, beat: Beat) -> Kept:
        self._shards.make_parents()
        self._held.take()
        self._shards.make_all(beat)
        beat()
        if self._measure is not None:
            self.capacity_bytes = min(self.capacity_bytes, self._measure())
            self._space.cap(self.capacity_bytes)
        found = recover(self._index, self._shards, self._opener, beat)
        self.useless.update(found.useless)
        with self._lock:
            self._last_id = found.last_id
        sizes = {extent_id: info.size_bytes for extent_id, info in found.extents.items()}
        self._space.open(sizes, found.foreign, beat)
        return list(found.extents.values()), [record for _, record in found.sessions.values()]

    def _ask(self, beat: Beat) -> None:
        """Return if the disk answers. Called in the watch's thread. Raises OSError."""
        if self._shards.has_left():
            raise OSError(errno.ENODEV, "another file system lies in its place than at the start")
        newest = [self._shards.path(extent_id) for extent_id in self._space.extent_ids()[-1:]]
        ask_device(read=newest, write=str(self._shards.root / "asked"), beat=beat, deadline_s=self._deadline_s)

    def _release(self) -> None:
        self._index.close()
        self._held.release()
