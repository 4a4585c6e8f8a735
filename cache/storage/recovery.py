"""Finds the extents and sessions that an earlier process has left in the directory of a model."""

import logging
from dataclasses import dataclass
from pathlib import Path

from reprise.cache.blocks.stored import ExtentInfo, SessionRecord
from reprise.cache.storage.directory import Foreign, scan
from reprise.cache.storage.errors import BlockMissing, Problem
from reprise.cache.storage.extent_file import remove_extent
from reprise.cache.storage.extent_opener import ExtentOpener
from reprise.cache.storage.index import DiskIndex
from reprise.cache.storage.io_threads import Beat
from reprise.cache.storage.shards import Shards

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    extents: dict[int, ExtentInfo]  # extents that can be used, in order of writing
    sessions: dict[tuple[str, str, str], tuple[int, SessionRecord]]  # the last record of each, with its stamp
    foreign: list[Foreign]  # records of other models, and those of ours that are kept although they cannot be used
    useless: dict[int, Problem]  # extents that cannot be used -> why
    last_id: int  # the highest id or stamp


def recover(index: DiskIndex, shards: Shards, opener: ExtentOpener, beat: Beat) -> Recovered:
    """Open the index and make it agree with the files. beat: called between the steps, so that a deadline applies to
    each. No other process or thread may use the directory meanwhile. Raises OSError, sqlite3.Error."""
    known, sessions = index.open(beat)
    beat()
    files, foreign = scan(shards.root, shards.own, beat)
    extents: dict[int, ExtentInfo] = {}
    useless: dict[int, Problem] = {}
    for extent_id, size in sorted(files.items()):
        row = known.get(extent_id)
        if row is not None and row.size_bytes == size:
            extents[extent_id] = row
            continue
        # The file has no row, because a crash can happen between the two writes. Its header decides; a file without a
        # valid one is deleted.
        beat()
        try:
            info = opener.read_info(extent_id)
        except BlockMissing as missing:
            log.warning("ignoring an unusable record: %s", missing)
            useless[extent_id] = Problem(missing.reason, str(missing))
            path = shards.path(extent_id)
            # The failure may be temporary, or the secret may have changed: delete such files only when their room is
            # needed.
            if missing.reason in {"io", "forged"}:
                foreign.append(Foreign(extent_id, Path(path), size))
            else:
                remove_extent(path)
            continue
        extents[extent_id] = info
        index.add(info, stamp=extent_id)
        if info.session.context and sessions.get(info.session.names, (0, None))[0] < extent_id:
            sessions[info.session.names] = (extent_id, info.session)
    gone = Problem("missing", "its file is gone")
    useless.update(dict.fromkeys(known.keys() - files.keys(), gone))
    index.remove(known.keys() - extents.keys())
    # Ids known from file names alone do not count: a stranger could choose the highest one, which would leave no ids.
    last_id = max([*extents, *known, *(stamp for stamp, _ in sessions.values())], default=0)
    return Recovered(extents, sessions, foreign, useless, last_id)
