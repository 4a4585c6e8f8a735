"""Counts the bytes that extent files take on disk, and makes room for new ones."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from reprise.cache.storage.directory import Foreign, drop_foreign
from reprise.cache.storage.errors import TierFull
from reprise.cache.storage.io_threads import Beat


class DiskSpace:
    """A counter that enforces the disk tier's cap on bytes, for the ExtentStore. All files count, including files being
    written and those of other fingerprints (models or kinds of KV). Thread-safe; the lock is never held during I/O."""

    def __init__(self, *, root: Path, own: Path, capacity_bytes: int, min_free_bytes: int) -> None:
        """Set up. root: a path on the file system that must keep min_free_bytes free. own: the directory of our model,
        which is not deleted."""
        self._root, self._own = root, own
        self._capacity_bytes, self._min_free_bytes = capacity_bytes, min_free_bytes
        self._lock = threading.Lock()  # guards what follows
        self._sizes: dict[int, int] = {}  # extent id -> bytes, of our complete and durable records
        self._foreign: deque[Foreign] = deque()  # oldest first
        self._used = 0
        self._unwritten = 0  # the part of `_used` that may not have been taken from the file system yet

    def open(self, sizes: Mapping[int, int], foreign: Iterable[Foreign], beat: Beat) -> None:
        """Count the extent files that a scan found: `sizes` by id for this model's, and `foreign` ones. Deletes foreign
        files, the oldest first, while the total exceeds the cap. beat: called before each deletion, so that a
        deadline applies to each."""
        with self._lock:
            self._sizes = dict(sizes)
            self._foreign = deque(sorted(foreign, key=lambda record: record.extent_id))
            self._used = sum(self._sizes.values()) + sum(record.size_bytes for record in self._foreign)
        while self._foreign and self._used > self._capacity_bytes:
            beat()
            self._drop(self._foreign.popleft())

    def cap(self, capacity_bytes: int) -> None:
        """Set the most bytes that extent files may take on disk. Called before `open`."""
        with self._lock:
            self._capacity_bytes = capacity_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used

    def __contains__(self, extent_id: int) -> bool:
        with self._lock:
            return extent_id in self._sizes

    def extent_ids(self) -> list[int]:
        """Return the ids of our extents, in order of writing."""
        with self._lock:
            return sorted(self._sizes)

    def reserve(self, size: int) -> None:
        """Reserve room for an extent file of `size` bytes that will be written; `settle` must follow. Deletes extent
        files of other fingerprints to make room. Raises TierFull, OSError."""
        while True:
            status = os.statvfs(self._root)
            free = status.f_bavail * status.f_frsize
            with self._lock:
                over = self._used + size - self._capacity_bytes
                under = self._min_free_bytes - (free - self._unwritten - size)
                if over <= 0 and under <= 0:
                    self._used += size
                    self._unwritten += size
                    return
                foreign = self._foreign.popleft() if self._foreign and size <= self._capacity_bytes else None
            if foreign is None:
                excess = {"over the cap": over, "below the file system's floor": under}
                reasons = [f"{count} {where}" for where, count in excess.items() if count > 0]
                raise TierFull(f"{size} bytes: {', '.join(reasons)}")
            self._drop(foreign)

    def settle(self, extent_id: int, size: int, *, stored: bool, stays: bool) -> None:
        """End a reservation of `size` bytes for an extent. stored: whether the extent was written. stays: for one that
        was not, whether some of its bytes are still on disk, in a partial file that cannot be deleted; then they
        count."""
        with self._lock:
            self._unwritten -= size
            if stored:
                self._sizes[extent_id] = size
            elif not stays:
                self._used -= size

    def release(self, *extent_ids: int) -> None:
        """Stop counting extents whose files are gone. Unknown ids are ignored."""
        with self._lock:
            self._used -= sum(self._sizes.pop(extent_id, 0) for extent_id in extent_ids)

    def _drop(self, foreign: Foreign) -> None:
        if drop_foreign(foreign, own=self._own):
            with self._lock:
                self._used -= foreign.size_bytes
