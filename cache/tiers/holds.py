"""Keeps blocks in DRAM and on disk whatever the policies say: those of pinned sessions, those still to be written, and
those that a codec is still to compress."""

from collections.abc import Callable

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, SessionName


class KeysWhere:
    """A container of the block keys for which a function returns true."""

    def __init__(self, contains: Callable[[BlockKey], bool]) -> None:
        self._contains = contains

    def __contains__(self, key: object) -> bool:
        return self._contains(key)  # type: ignore[arg-type]


class PinnedSessions(set[SessionName]):
    """A set of the sessions whose saved blocks are not evicted."""

    def own(self, row: BlockRow) -> bool:
        """Return whether a pinned session owns this block."""
        return bool(self) and any(owner in self for owner in row.owners)


class DirtyBlocks:
    """The dirty blocks: blocks in DRAM that are still to be written to disk, each listed under the session with whose
    blocks it is written. Saves, DiskLedger and WriteBehind add them, WriteBehind and SlotTier remove them, on the
    engine's thread."""

    def __init__(self, *, has_disk: bool) -> None:
        """Begin empty. has_disk: whether there is a disk; without one no block is ever dirty."""
        self._has_disk = has_disk
        self.changes = 0  # number of events after which there may be something new to write
        self.may_leave = False  # the disk refuses writes: DRAM must go on without these blocks
        self.sessions: dict[SessionName, dict[BlockKey, None]] = {}
        """Session -> its blocks to write, in the order in which they were added. All of a session's blocks may have
        left DRAM since. Read only."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks to write. A block that was added for two sessions counts twice."""
        return sum(map(len, self.sessions.values()))

    def of(self, name: SessionName) -> list[BlockKey]:
        """Return a session's blocks to write, in the order in which they were added."""
        return list(self.sessions.get(name, ()))

    def add(self, row: BlockRow) -> None:
        """Add a block that has an owner and no copy on disk."""
        self.changes += 1
        if self._has_disk:
            self.sessions.setdefault(row.owners[0], {})[row.key] = None

    def hold(self, row: BlockRow) -> bool:
        """Return whether a block is dirty, so that it must stay in DRAM until it is on disk. False for all while the
        disk refuses writes."""
        return not self.may_leave and any(row.key in self.sessions.get(owner, ()) for owner in row.owners)

    def left_dram(self, row: BlockRow) -> None:
        """Remove a block that has left DRAM, from which it can no longer be written."""
        for owner in row.owners:
            if owner in self.sessions:
                self.sessions[owner].pop(row.key, None)

    def written(self, name: SessionName, keys: list[BlockKey]) -> None:
        """Remove blocks of a session that are on disk now."""
        for key in keys:
            self.sessions.get(name, {}).pop(key, None)

    def settle(self, name: SessionName) -> None:
        """Remove a session's entry if no block of it is left to write."""
        if not self.sessions.get(name):
            self.sessions.pop(name, None)

    def forget(self, name: SessionName) -> list[BlockKey]:
        """Remove a session that is gone. Returns the blocks that were to be written with it."""
        return list(self.sessions.pop(name, ()))


class Holds:
    """The reasons for which blocks stay in DRAM. All tiers of slots ask it, on the engine's thread."""

    def __init__(self, *, pinned: PinnedSessions, dirty: DirtyBlocks, form: CodedForm) -> None:
        self.pinned, self.dirty = pinned, dirty
        self._form = form

    def keep(self, row: BlockRow) -> bool:
        """Return whether a block must stay in DRAM, in one of its tiers of slots: it is not on disk yet, or its session
        is pinned."""
        return ("disk" not in row.copies and self.dirty.hold(row)) or self.pinned.own(row)

    def keep_rows(self, row: BlockRow) -> bool:
        """Return whether a block's rows must stay in DRAM. They must while the codec has yet to compress them. They
        must also while the block itself has to stay in DRAM, unless a slot has it compressed."""
        return "coded" not in row.copies and (self._form.awaits(row) or self.keep(row))
