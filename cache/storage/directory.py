"""Finds the disk tier's files and the model that each belongs to."""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reprise.cache.blocks.stored import is_coded
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_file import read_header, remove_extent
from reprise.cache.storage.extent_format import MAX_EXTENT_ID, ExtentHeader, SegmentSizes
from reprise.cache.storage.io_threads import Beat

_FINGERPRINT = re.compile(r"(?:[0-9a-f]{2})+")
_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"([0-9a-f]{16})\.(kv|tmp)")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A record (file of the disk tier) of another fingerprint (another model or kind of KV), or one of ours that cannot
    be read or trusted."""

    extent_id: int
    path: Path
    size_bytes: int


def scan(root: Path, own: Path, beat: Beat) -> tuple[dict[int, int], list[Foreign]]:
    """Return the sizes of this model's extent files by id, and the extent files of other models as `Foreign`. own: the
    directory of this model's files. beat: called between the steps, so that a deadline applies to each. Deletes
    temporary files, since no process is writing now, and extent files that lie in the wrong shard or have an id above
    MAX_EXTENT_ID, of any model. Ignores files with other names. Raises OSError."""
    ours: dict[int, int] = {}
    foreign: list[Foreign] = []
    for directory in _directories(root, _FINGERPRINT):
        for shard in _directories(directory, _SHARD):
            beat()
            with os.scandir(shard) as entries:
                for entry in entries:
                    found = _RECORD.fullmatch(entry.name)
                    if found is None or entry.is_dir(follow_symlinks=False):
                        continue
                    extent_id, path = int(found[1], 16), Path(entry.path)
                    if found[2] == "tmp" or extent_id > MAX_EXTENT_ID or found[1][-2:] != shard.name:
                        path.unlink()
                    elif directory == own:
                        ours[extent_id] = entry.stat(follow_symlinks=False).st_size
                    else:
                        foreign.append(Foreign(extent_id, path, entry.stat(follow_symlinks=False).st_size))
    return ours, foreign


def stored_bytes(directory: Path) -> int:
    """Return the size of all extent files in a disk tier's directory, of any model; 0 if there are none. Raises
    OSError."""
    root = directory / "kv"
    models = _directories(root, _FINGERPRINT) if root.is_dir() else ()
    shards = (shard for model in models for shard in _directories(model, _SHARD))
    return sum(path.stat().st_size for shard in shards for path in shard.iterdir() if _RECORD.fullmatch(path.name))


def stored_models(directory: Path, key: bytes) -> dict[bytes, SegmentSizes]:
    """Return by fingerprint the segment sizes of every model of which a disk tier's directory has an extent file with
    an intact header. Tools need this to open the tier without the model. key: from
    `reprise.cache.storage.extent_format.record_key`. Raises OSError."""
    models: dict[bytes, SegmentSizes] = {}
    root = directory / "kv"
    for model in _directories(root, _FINGERPRINT) if root.is_dir() else ():
        found: dict[bool, tuple[int, ...]] = {}  # sizes by whether such extents are coded
        for path in sorted(model.glob("??/*.kv")):
            header = _header_of(path, key)
            if header is not None and header.fingerprint.hex() == model.name:
                found.setdefault(is_coded(header.extent_id), header.segment_bytes)
                if len(found) == 2:
                    break
        if found:
            raw, coded = (found.get(kind, next(iter(found.values()))) for kind in (False, True))
            models[bytes.fromhex(model.name)] = SegmentSizes(raw, None if raw == coded else coded)
    return models


def _header_of(path: Path, key: bytes) -> ExtentHeader | None:
    with contextlib.suppress(BlockMissing, OSError):
        # Non-blocking: opening a FIFO in the file's place would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                return read_header(fd, status.st_size, key)[0]
        finally:
            os.close(fd)
    return None


def nameless_records(directory: Path, key: bytes) -> list[Foreign]:
    """Return the extent files of those models none of whose files has an intact header. Their contents cannot be
    identified any more. key: from `reprise.cache.storage.extent_format.record_key`. Raises OSError."""
    root = directory / "kv"
    intact = {fingerprint.hex() for fingerprint in stored_models(directory, key)}
    models = _directories(root, _FINGERPRINT) if root.is_dir() else ()
    paths = (path for model in models if model.name not in intact for path in sorted(model.glob("??/*.kv")))
    return [Foreign(int(path.stem, 16), path, path.stat().st_size) for path in paths if _RECORD.fullmatch(path.name)]


def drop_foreign(record: Foreign, *, own: Path | None) -> bool:
    """Delete a record that another model or another secret left in this directory. If it was the last one of its
    fingerprint, delete the whole directory of that fingerprint too, unless that is `own`. Return whether the record is
    gone."""
    try:
        remove_extent(str(record.path))
    except OSError:
        return False
    shard, directory = record.path.parent, record.path.parent.parent
    if directory == own:
        return True
    with contextlib.suppress(OSError):
        shard.rmdir()  # fails while it holds other records
        for other in _directories(directory, _SHARD):  # most are empty
            other.rmdir()
        shutil.rmtree(directory, ignore_errors=True)
    return True


def _directories(path: Path, name: re.Pattern[str]) -> Iterator[Path]:
    for entry in sorted(path.iterdir()):
        if name.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            yield entry
