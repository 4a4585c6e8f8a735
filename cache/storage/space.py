"""What the records on disk take, and who makes room for another."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from cache.storage.directory import Foreign, drop_foreign
from cache.storage.errors import TierFull
from cache.storage.io_threads import Beat


class DiskSpace:
    """All files count towards the cap, those being written and other fingerprints' too. Thread-safe; the lock is never
    held during I/O."""

    def __init__(self, *, root: Path, own: Path, capacity_bytes: int, min_free_bytes: int) -> None:
        """root: on the file system of which min_free_bytes are left alone; own: of our model, which stays."""
        self._root, self._own = root, own
        self._capacity_bytes, self._min_free_bytes = capacity_bytes, min_free_bytes
        self._lock = threading.Lock()  # guards what follows
        self._sizes: dict[int, int] = {}  # extent id -> bytes; ours, complete and durable
        self._foreign: deque[Foreign] = deque()  # oldest first
        self._used = 0
        self._unwritten = 0  # of these, what the file system may not have been asked for yet

    def open(self, sizes: Mapping[int, int], foreign: Iterable[Foreign], beat: Beat) -> None:
        """What was found. Others' records leave while all are more than the cap."""
        with self._lock:
            self._sizes = dict(sizes)
            self._foreign = deque(sorted(foreign, key=lambda record: record.extent_id))
            self._used = sum(self._sizes.values()) + sum(record.size_bytes for record in self._foreign)
        while self._foreign and self._used > self._capacity_bytes:
            beat()
            self._drop(self._foreign.popleft())

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used

    def __contains__(self, extent_id: int) -> bool:
        with self._lock:
            return extent_id in self._sizes

    def extent_ids(self) -> list[int]:
        """Ours, in order of writing."""
        with self._lock:
            return sorted(self._sizes)

    def reserve(self, size: int) -> None:
        """For a record that will be written; `settle` follows. Others' records leave for it. Raises TierFull,
        OSError."""
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
        """What was reserved has been tried. stays: something of it is there, and be it half a file that cannot even be
        removed."""
        with self._lock:
            self._unwritten -= size
            if stored:
                self._sizes[extent_id] = size
            elif not stays:
                self._used -= size

    def release(self, *extent_ids: int) -> None:
        """Their files are gone. Unknown ids are forgiven."""
        with self._lock:
            self._used -= sum(self._sizes.pop(extent_id, 0) for extent_id in extent_ids)

    def _drop(self, foreign: Foreign) -> None:
        if drop_foreign(foreign, own=self._own):
            with self._lock:
                self._used -= foreign.size_bytes
