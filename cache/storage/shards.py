"""Manages the directories in which one model's extents lie: 256 shards, by the last two digits of the ids."""

import logging
import os
import threading
from pathlib import Path

from reprise.cache.storage.extent_file import sync_directory
from reprise.cache.storage.io_threads import Beat

NUM_SHARDS = 256
log = logging.getLogger(__name__)


class Shards:
    """The directories of one model's extents, for the disk tier's writers and readers. Thread-safe. Methods raise
    OSError."""

    def __init__(self, root: Path, fingerprint: bytes) -> None:
        """Set up. root: the directory that has the directories of all models."""
        self.root, self.own = root, root / fingerprint.hex()
        self._lock = threading.Lock()  # guards what follows; never held during I/O
        self._unsynced: set[str] = set()  # directories in which something was deleted since their last sync
        self._device: int | None = None  # on which the directory was when it was made or found

    def path(self, extent_id: int) -> str:
        """Return the path of an extent's file. Avoids pathlib, whose cost every turn would pay."""
        name = f"{extent_id:016x}"
        return f"{self.own}/{name[-2:]}/{name}.kv"

    def make_parents(self) -> None:
        """Make the directories above the shards, closed to other users."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_directory(str(self.own))
        for directory in (self.root, self.own):
            directory.chmod(0o700)
        if self._device is None:
            self._device = self.root.stat().st_dev

    def has_left(self) -> bool:
        """Return whether another file system than at first lies where the directory is or was, as when a disk is
        unmounted or pulled out. A directory that was only deleted has not left."""
        for path in (self.root, *self.root.absolute().parents):
            try:
                return path.stat().st_dev != self._device
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return True
        return True

    def make_all(self, beat: Beat) -> None:
        """Make the 256 directories (shards) that are missing, all at once: making one when an extent first needs it
        would cost as much as writing that extent's file. Those that are there are only listed. beat: called before
        each, so that a deadline applies to each."""
        with os.scandir(self.own) as entries:
            there = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        made = False
        for name in (f"{number:02x}" for number in range(NUM_SHARDS)):
            if name not in there:
                beat()
                made |= _make_directory(f"{self.own}/{name}")
        if made:
            sync_directory(self.own)

    def make_missing(self, extent_id: int, beat: Beat) -> None:
        """Make all missing shards if that of this extent was deleted or a link took its place. beat: as for
        `make_all`."""
        shard = os.path.dirname(self.path(extent_id))
        if not os.path.isdir(shard) or os.path.islink(shard):
            self.make_all(beat)

    def note_deletion(self, extent_id: int) -> None:
        """Note that an extent was deleted, for `sync_deletions`."""
        with self._lock:
            self._unsynced.add(os.path.dirname(self.path(extent_id)))

    def sync_deletions(self, beat: Beat) -> None:
        """Make all deletions so far survive a power failure. beat: called before each directory, so that a deadline
        applies to each."""
        with self._lock:
            directories, self._unsynced = self._unsynced, set()
        for directory in directories:
            beat()
            sync_directory(directory)


def _make_directory(path: str) -> bool:
    """Make a directory unless it is there. Returns whether it was missing. Replaces a link by a directory, because its
    target is not ours and a start would not look for records there. Raises OSError."""
    if os.path.islink(path):
        log.warning("%s is a link, which is not followed; a directory replaces it", path)
        os.unlink(path)
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        return False
    return True
