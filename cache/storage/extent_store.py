"""The disk tier: one file per extent, every byte checked when it is read, every blocking call with a deadline.

    DIRECTORY/kv/lock                           held while a server runs here; says which
    DIRECTORY/kv/<fingerprint>/index.sqlite     see cache/storage/index.py
    DIRECTORY/kv/<fingerprint>/<xx>/<id>.kv     see cache/storage/extent_format.py; xx are the id's last two digits

Other fingerprints' directories are left alone until their room is needed: starting with another model by mistake costs
nothing. Their bytes count towards the cap.
"""

import contextlib
import errno
import logging
import mmap
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from cache.storage.directory import Foreign, HeaderCache, scan
from cache.storage.directory_lock import DirectoryLock, DirectoryLocked
from cache.storage.errors import BlockMissing, TierFailed, TierFull
from cache.storage.extent_file import (
    CHUNK_BYTES,
    ParsedExtent,
    io_buffer,
    open_extent,
    remove_extent,
    sync_directory,
    temporary_of,
    write_extent,
)
from cache.storage.extent_format import MAX_EXTENT_ID, ExtentHeader, Layout, check_segments, encode_header
from cache.storage.extent_reader import ExtentReader, flat
from cache.storage.index import DiskIndex
from cache.storage.io_threads import Beat, IoDeadline, IoThreads
from cache.storage.rare_log import RareLog
from cache.storage.space import DiskSpace
from cache.storage.thread_priority import WRITING
from cache.storage.throttle import Throttle

READ_THREADS = 8
WRITE_THREADS = 4  # their own, so that reads do not stand behind what hangs while it writes, nor the other way round
MAX_FINGERPRINT_BYTES = 64
NUM_SHARDS = 256
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
log = logging.getLogger(__name__)
T = TypeVar("T")


class ExtentStore:
    """Thread-safe. `open` comes first and `close` last; in between every method may be called from any thread, and
    returns or raises within the deadline of the steps it consists of (besides what the bandwidth caps demand).

    Source: AttentionStore (arXiv 2403.19708) §3.3, the disk below DRAM; that it outlives the process is ours.
    """

    name = "disk"

    def __init__(
        self,
        *,
        directory: Path,
        fingerprint: bytes,
        segment_bytes: Sequence[int],
        key: bytes,
        capacity_bytes: int,
        min_free_bytes: int,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        deadline_s: float,
        owner: str,
    ) -> None:
        """segment_bytes: of one block, by layer. key: `cache.storage.extent_format.record_key`. min_free_bytes of the
        file system are left alone. Caps of 0: none. owner: who uses the directory meanwhile, for people that want it
        too."""
        if not 0 < len(fingerprint) <= MAX_FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has 1 to {MAX_FINGERPRINT_BYTES} bytes")
        check_segments(segment_bytes)
        self.capacity_bytes = capacity_bytes
        self._fingerprint = fingerprint
        self._segment_bytes = tuple(segment_bytes)
        self._key = key
        self._directory, self._root = directory, directory / "kv"
        self._own = self._root / fingerprint.hex()
        self._deadline_s = deadline_s
        self._held = DirectoryLock(directory, owner)
        self._space = DiskSpace(
            root=self._root, own=self._own, capacity_bytes=capacity_bytes, min_free_bytes=min_free_bytes
        )
        self._index = DiskIndex(path=self._own / "index.sqlite", key=key)
        self._reading = Throttle(bytes_per_s=read_bytes_per_s, clock=time.monotonic, sleep=time.sleep)
        self._writing = Throttle(bytes_per_s=write_bytes_per_s, clock=time.monotonic, sleep=time.sleep)
        self._reads: IoThreads | None = None
        self._writes: IoThreads | None = None  # and deletions, and the index
        self._headers = HeaderCache()
        self._log = RareLog()
        self._making = threading.Lock()  # held by who makes the directory again; taken before `_lock`
        self._buffers: deque[mmap.mmap] = deque(maxlen=READ_THREADS)
        self._write_buffers: deque[mmap.mmap] = deque(maxlen=WRITE_THREADS)
        self._buffer_bytes = max(CHUNK_BYTES, *segment_bytes)

        self._lock = threading.Lock()  # guards what follows; never held during I/O
        self._last_id = 0
        self._unsynced: set[str] = set()  # directories in which something was deleted
        self._lost: list[int] = []  # extents that somebody deleted
        self._damaged: set[int] = set()  # extents of which that was said
        # Records that `open` found to be none, or missing, and why; those it could read are gone.
        self.useless: dict[int, str] = {}

    def open(self) -> tuple[list[ExtentInfo], list[SessionRecord]]:
        """Take the lock, sweep what a crash left, and tell what is there: extents in order of writing, sessions as they
        were known last. More than capacity_bytes may be there, when the cap was lowered: delete down to it.
        Raises DirectoryLocked, OSError."""
        deadline_s = self._deadline_s
        self._reads = IoThreads(name="disk-read", num_threads=READ_THREADS, deadline_s=deadline_s, lower_by=0)
        self._writes = IoThreads(name="disk-write", num_threads=WRITE_THREADS, deadline_s=deadline_s, lower_by=WRITING)
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

    def close(self) -> None:
        """What runs is given its deadline. Then another server may use the directory, unless something hangs in it: the
        lock then goes with the process."""
        if self._writes is None:
            return
        if self._close_threads():
            last = IoThreads(name="disk-close", num_threads=1, deadline_s=self._deadline_s, lower_by=0)
            with contextlib.suppress(IoDeadline):
                last.call(lambda _: self._release(), late=lambda: None)
            last.close()
        else:
            log.warning("the disk tier closes while an operation hangs in %s", self._directory)

    def _close_threads(self) -> bool:
        """Whether all have ended."""
        pools, self._reads, self._writes = (self._reads, self._writes), None, None
        ended = [pool.close() for pool in pools if pool is not None]
        return all(ended)

    def used_bytes(self) -> int:
        """The sizes of all files of records, whole pages, including those being written."""
        return self._space.used_bytes

    def write(
        self,
        session: SessionRecord,
        blocks: Sequence[StoredBlock],
        checksums: bytes,
        segments: Callable[[int], Sequence[memoryview]],
    ) -> ExtentInfo:
        """Store the blocks as one extent, all or nothing; durable on return. checksums: of all segments, layer by layer
        (`cache.storage.extent_format.checksum`); they are not compared with the bytes before these are read again.
        segments(layer) -> the bytes of its blocks, in their order and cut wherever they do not lie side by side; read
        until this returns or raises (after a deadline perhaps later, but nothing comes of it).
        Raises TierFull (the cap, the floor, no space) or TierFailed (read-only, broken, deadline, or more than a record
        may hold: whatever it is, nobody's answer depends on it)."""
        views = [[flat(view) for view in segments(layer)] for layer in range(len(self._segment_bytes))]
        extent_id = self._new_id()
        try:
            for size, layer_views in zip(self._segment_bytes, views, strict=True):
                if sum(map(len, layer_views)) != size * len(blocks):
                    raise ValueError(f"a segment of this layer has {size} bytes")
            header = ExtentHeader(
                fingerprint=self._fingerprint,
                extent_id=extent_id,
                session=session,
                blocks=tuple(blocks),
                segment_bytes=self._segment_bytes,
                checksums=checksums,
            )
            start = encode_header(header, self._key)
        except ValueError as error:
            raise TierFailed(f"write: {error}", reason="format") from error
        layout = Layout.of(header_bytes=len(start), segment_bytes=self._segment_bytes, num_blocks=len(blocks))
        info = ExtentInfo(header.extent_id, session, header.blocks, layout.size_bytes)

        def store(beat: Beat) -> float:
            self._ensure_directory(beat)
            self._space.reserve(layout.size_bytes)
            due = self._writing.book(layout.size_bytes)
            self._store(info.extent_id, start, layout, views, beat)
            beat()
            try:
                self._index.add(info, stamp=info.extent_id)
            except sqlite3.Error as error:
                problem = "extent %016x and some before it are not in the index and will be found by their headers: %s"
                self._log.warn("index", problem, info.extent_id, error)
            return due

        due = self._do("write", store, late=partial(self._forget, [info.extent_id]))
        self._writing.wait(due)
        return info

    def reader(self, extent_id: int) -> ExtentReader:
        """Checks the header. Raises BlockMissing."""
        return self._open_reader(extent_id, self._headers.get(extent_id))

    def delete(self, *extent_ids: int) -> None:
        """The bytes are gone when this returns; open readers may go on. Unknown ids are forgiven. Raises TierFailed:
        those in front may be gone."""
        here = [extent_id for extent_id in extent_ids if extent_id in self._space]
        if here:
            self._do("delete", lambda beat: self._forget(here, beat))

    def put_session(self, record: SessionRecord) -> None:
        """The newest record of a session wins, be it this or one that came with an extent. Raises TierFailed."""
        stamp = self._new_id()

        def put(beat: Beat) -> None:
            self._ensure_directory(beat)
            self._index.put_session(record, stamp=stamp)

        self._do("put_session", put)

    def delete_sessions(self, *names: tuple[str, str, str]) -> None:
        """Forget them (tenant, salt, session id); their extents are deleted before. Afterwards these deletions outlive
        a power failure: that is most of the price, so many at once cost little more than one. Raises TierFailed."""

        def forget(beat: Beat) -> None:
            self._index.delete_sessions(names)
            with self._lock:
                directories, self._unsynced = self._unsynced, set()
            for directory in directories:
                beat()
                sync_directory(directory)

        self._do("delete_sessions", forget)

    def verify(self) -> Iterator[tuple[int, str | None]]:
        """Read everything: (extent id, None or what is wrong with it)."""
        for extent_id in self._space.extent_ids():
            try:
                with self._open_reader(extent_id, None) as reader:
                    reader.check()
                yield extent_id, None
            except BlockMissing as missing:
                yield extent_id, f"{missing.reason}: {missing}"

    def take_lost(self) -> list[int]:
        """Extents found since the last call to have been deleted by somebody else, all together."""
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
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise TierFull(f"{what}: {error}") from error
            raise TierFailed(f"{what}: {error}", reason="io") from error
        except DirectoryLocked as error:
            raise TierFailed(f"{what}: {error}", reason="io") from error
        except sqlite3.Error as error:
            raise TierFailed(f"{what}: the index failed: {error}", reason="io") from error

    def _path(self, extent_id: int) -> str:
        name = f"{extent_id:016x}"
        return f"{self._own}/{name[-2:]}/{name}.kv"

    def _new_id(self) -> int:
        # From the clock, so that ids are never used twice even if index and records are both lost; from the last one,
        # so that they increase although the clock may not.
        with self._lock:
            self._last_id = max(self._last_id + 1, time.time_ns())
            if self._last_id > MAX_EXTENT_ID:
                raise TierFailed("no extent ids are left: what does the clock say?", reason="format")
            return self._last_id

    def _store(
        self, extent_id: int, header: bytes, layout: Layout, views: Sequence[Sequence[memoryview]], beat: Beat
    ) -> None:
        path, stored = self._path(extent_id), False
        try:
            if not _is_directory(os.path.dirname(path)):  # somebody took it away, or put a link there
                self._make_shards(beat)
            beat()
            self._write_file(path, header, layout, views, beat)
            stored = True
        finally:
            stays = stored or os.path.exists(path) or os.path.exists(temporary_of(path))
            self._space.settle(extent_id, layout.size_bytes, stored=stored, stays=stays)

    def _make_shards(self, beat: Beat) -> None:
        """All at once: a directory costs a write as much as its file does."""
        made = False
        for number in range(NUM_SHARDS):
            beat()
            made |= _make_directory(f"{self._own}/{number:02x}")
        if made:
            sync_directory(self._own)

    def _write_file(
        self, path: str, header: bytes, layout: Layout, views: Sequence[Sequence[memoryview]], beat: Beat
    ) -> None:
        try:
            buffer = self._write_buffers.pop()
        except IndexError:
            buffer = io_buffer(CHUNK_BYTES)
        try:
            write_extent(path=path, header=header, layout=layout, segments=views, buffer=buffer, beat=beat)
        finally:
            self._write_buffers.append(buffer)

    def _remove(self, extent_id: int) -> None:
        path = self._path(extent_id)
        remove_extent(path)
        self._headers.drop(extent_id)
        self._space.release(extent_id)
        with self._lock:
            self._unsynced.add(os.path.dirname(path))

    def _forget(self, extent_ids: Sequence[int], beat: Beat = lambda: None) -> None:
        gone: list[int] = []
        try:
            for extent_id in extent_ids:
                beat()
                self._remove(extent_id)
                gone.append(extent_id)
        finally:  # whatever stopped it, those in front are gone, and nobody will ask for them again
            try:
                self._index.remove(gone)
            except sqlite3.Error as error:
                ids = ", ".join(f"{extent_id:016x}" for extent_id in gone[:3])
                self._log.warn("index", "the index still names extent %s, which is gone: %s", ids, error)

    def _open_reader(self, extent_id: int, known: ParsedExtent | None) -> ExtentReader:
        if extent_id not in self._space:
            raise BlockMissing(f"extent {extent_id:016x} is not here", reason="missing")
        threads = self._reads
        if threads is None:
            raise BlockMissing("the disk tier is closed", reason="io")
        opened: list[int] = []

        def open_it(_: Beat) -> ParsedExtent:
            fd, parsed = open_extent(
                self._path(extent_id),
                fingerprint=self._fingerprint,
                segment_bytes=self._segment_bytes,
                key=self._key,
                extent_id=extent_id,
                known=known,
            )
            opened.append(fd)
            return parsed

        def close_late() -> None:
            for fd in opened:
                os.close(fd)

        try:
            extent = threads.call(open_it, late=close_late)
        except BlockMissing as missing:
            self._tell_damage(extent_id, missing)
            raise
        except IoDeadline as error:
            raise BlockMissing(f"extent {extent_id:016x}: {error}", reason="deadline") from error
        self._headers.put(extent_id, extent)
        return ExtentReader(
            fd=opened[0],
            extent=extent,
            io=threads,
            throttle=self._reading,
            buffers=self._buffers,
            buffer_bytes=self._buffer_bytes,
            on_damage=partial(self._tell_damage, extent_id),
        )

    def _tell_damage(self, extent_id: int, missing: BlockMissing) -> None:
        """Once for each extent: who reads it computes instead, and says so of every load."""
        with self._lock:
            if extent_id in self._damaged:
                return
            self._damaged.add(extent_id)
        log.warning("a record is damaged, its KV will be computed: %s (%s)", missing, missing.reason)

    def _ensure_directory(self, beat: Beat) -> None:
        """Whoever deletes the directory under a running server means its contents: begin anew, and go on. The lock is
        taken again too, since the next server would make another file and lock that. Raises DirectoryLocked, OSError.
        """
        with self._making:
            has_lock = self._held.is_held
            if has_lock and self._index.is_there():
                return
            beat()
            log.warning("%s was deleted while a server runs here; what it held is lost and it is made again", self._own)
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_directory(str(self._own))
            for directory in (self._root, self._own):
                directory.chmod(0o700)
            if not has_lock:
                self._held.take()
            self._make_shards(beat)
            self._index.make_again(beat)
            gone = [one for one in self._space.extent_ids() if not os.path.exists(self._path(one))]
            for extent_id in gone:
                self._headers.drop(extent_id)
            self._space.release(*gone)
            with self._lock:
                self._lost += gone
                self._unsynced = {directory for directory in self._unsynced if os.path.exists(directory)}

    def _recover(self, beat: Beat) -> tuple[list[ExtentInfo], list[SessionRecord]]:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_directory(str(self._own))
        for directory in (self._root, self._own):
            directory.chmod(0o700)
        self._held.take()
        self._make_shards(beat)
        beat()
        known, sessions = self._index.open(beat)
        beat()
        files, foreign = scan(self._root, self._own, beat)
        extents: dict[int, ExtentInfo] = {}
        for extent_id, size in sorted(files.items()):
            row = known.get(extent_id)
            if row is not None and row.size_bytes == size:
                extents[extent_id] = row
                continue
            # No row, as a crash can fall between the two: the header decides, and a record that is none goes.
            beat()
            try:
                info = self._adopt(extent_id)
            except BlockMissing as missing:
                log.warning("a record is of no use: %s", missing)
                self.useless[extent_id] = f"{missing.reason}: {missing}"
                # Perhaps only today, or with this secret; it goes when its room is needed.
                if missing.reason in {"io", "forged"}:
                    foreign.append(Foreign(extent_id, Path(self._path(extent_id)), size))
                else:
                    remove_extent(self._path(extent_id))
                continue
            extents[extent_id] = info
            self._index.add(info, stamp=extent_id)
            if info.session.context and sessions.get(info.session.names, (0, None))[0] < extent_id:
                sessions[info.session.names] = (extent_id, info.session)
        self.useless.update((extent_id, "missing: its file is gone") for extent_id in known.keys() - files.keys())
        self._index.remove(known.keys() - extents.keys())
        with self._lock:
            # Not those that only a file's name has: anybody may have given it, and the highest leaves none to come.
            self._last_id = max([*extents, *known, *(stamp for stamp, _ in sessions.values())], default=0)
        self._space.open({extent_id: info.size_bytes for extent_id, info in extents.items()}, foreign, beat)
        return list(extents.values()), [record for _, record in sessions.values()]

    def _adopt(self, extent_id: int) -> ExtentInfo:
        fd, extent = open_extent(
            self._path(extent_id),
            fingerprint=self._fingerprint,
            segment_bytes=self._segment_bytes,
            key=self._key,
            extent_id=extent_id,
            known=None,
        )
        os.close(fd)
        return ExtentInfo(extent_id, extent.header.session, extent.header.blocks, extent.layout.size_bytes)

    def _release(self) -> None:
        self._index.close()
        self._held.release()


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _make_directory(path: str) -> bool:
    """Whether it was missing. A link in its place goes: what it leads to is not ours, and a start would not look for
    records there. Raises OSError."""
    if os.path.islink(path):
        log.warning("%s is a link, which is not followed; a directory takes its place", path)
        os.unlink(path)
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        return False
    return True
