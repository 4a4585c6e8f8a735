"""What keeps blocks in DRAM and on disk, whatever the policies say: their owners, and writes that are still to come."""

from collections.abc import Callable

from cache.blocks.keys import BlockKey
from cache.blocks.table import BlockRow, SessionName


class KeysWhere:
    """The blocks of which something is true, as a container."""

    def __init__(self, contains: Callable[[BlockKey], bool]) -> None:
        self._contains = contains

    def __contains__(self, key: object) -> bool:
        return self._contains(key)  # type: ignore[arg-type]


class PinnedSessions(set[SessionName]):
    """Sessions whose saved blocks are not evicted."""

    def own(self, row: BlockRow) -> bool:
        """Whether one of them owns this block."""
        return bool(self) and any(owner in self for owner in row.owners)


class DirtyBlocks:
    """Blocks that DRAM has and the disk is to get, by the session they are written with. Single-threaded."""

    def __init__(self, *, has_disk: bool) -> None:
        """has_disk: without one nothing is ever dirty."""
        self._has_disk = has_disk
        self.changes = 0  # events after which there may be something to write that was not there before
        self.may_leave = False  # the disk refuses writes: DRAM must go on without these blocks
        self._of: dict[SessionName, dict[BlockKey, None]] = {}

    @property
    def num_blocks(self) -> int:
        """One that was noted for two sessions counts twice."""
        return sum(map(len, self._of.values()))

    @property
    def sessions(self) -> list[SessionName]:
        """Those to look at. All that was noted for one may have left DRAM since."""
        return list(self._of)

    def of(self, name: SessionName) -> list[BlockKey]:
        """A session's blocks, in the order in which they were noted."""
        return list(self._of.get(name, ()))

    def add(self, row: BlockRow) -> None:
        """The block has an owner, and no copy on disk."""
        self.changes += 1
        if self._has_disk:
            self._of.setdefault(row.owners[0], {})[row.key] = None

    def hold(self, row: BlockRow) -> bool:
        """Whether this block must stay in DRAM until it is on disk."""
        return not self.may_leave and any(row.key in self._of.get(owner, ()) for owner in row.owners)

    def left_dram(self, row: BlockRow) -> None:
        """There is nothing left to write the block from."""
        for owner in row.owners:
            if owner in self._of:
                self._of[owner].pop(row.key, None)

    def written(self, name: SessionName, keys: list[BlockKey]) -> None:
        """These blocks of a session are on disk."""
        for key in keys:
            self._of.get(name, {}).pop(key, None)

    def settle(self, name: SessionName) -> None:
        """Forget a session of which nothing is left to write."""
        if not self._of.get(name):
            self._of.pop(name, None)

    def forget(self, name: SessionName) -> list[BlockKey]:
        """A session is gone. Returns what was to be written with it."""
        return list(self._of.pop(name, ()))
