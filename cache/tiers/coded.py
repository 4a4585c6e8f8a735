"""Keeps account of the part of DRAM that holds blocks as a codec made them. Touches no bytes.

Where KV is coded, DRAM is two pools in one budget: slots for rows (`dram.py`), which are few, and coded slots. A block
may be in both: then the rows, which are exact, are loaded, and leave without a loss when their slot is wanted.
"""

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.policies.eviction_policy import EvictionPolicy, enter
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.holds import DirtyBlocks, KeysWhere, PinnedSessions
from reprise.cache.tiers.slots import SlotPool

_LEAST_ROWS, _MOST_ROWS = 0.25, 0.75  # shares of DRAM's bytes for rows
_WARM_ROWS = 0.1  # of them, for what is warm and will be coded
_NEVER_CODED = 2.0  # blocks of a session: its first, and the one that is not full


def rows_share(session_blocks: float, ratio: float) -> float:
    """Return the share of DRAM's bytes that is for rows. session_blocks: mean blocks of a session; 0: not known. Two of
    them are never coded, and the others are so many times smaller then."""
    if session_blocks <= 0:
        return _LEAST_ROWS
    never = min(session_blocks, _NEVER_CODED)
    share = never / (never + (session_blocks - never) / ratio)
    return min(max(share + _WARM_ROWS, _LEAST_ROWS), _MOST_ROWS)


def split_dram(size_bytes: int, slot_bytes: int, coded_bytes: int, session_blocks: float = 0.0) -> tuple[int, int]:
    """Return how many slots for rows and how many coded slots a DRAM of so many bytes has. coded_bytes: of a coded
    block; 0: nothing is coded. session_blocks: see `rows_share`."""
    if not coded_bytes:
        return size_bytes // slot_bytes, 0
    slots = int(size_bytes * rows_share(session_blocks, slot_bytes / coded_bytes)) // slot_bytes
    return slots, (size_bytes - slots * slot_bytes) // coded_bytes


class CodedTier:
    """Single-threaded, part of the CacheManager. With no slots everything is a no-op."""

    def __init__(
        self,
        *,
        table: CacheTable,
        num_slots: int,
        slot_bytes: int,
        policy: EvictionPolicy,
        pinned: PinnedSessions,
        dirty: DirtyBlocks,
        stats: CacheStats,
    ) -> None:
        """slot_bytes: of a coded block."""
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.is_on = num_slots > 0
        self.policy = policy
        self.resident = 0  # slots that hold a block of the table
        self._table, self._pinned, self._dirty, self._stats = table, pinned, dirty, stats
        self._slots = SlotPool(num_slots)
        self.is_condemned = False
        """What was coded changes answers by more than it may: none of it is found any more, and no more is coded."""
        self._is_quarantined = False
        self._immovable = KeysWhere(self._is_immovable)
        self._counted = (-1, 0)  # `DirtyBlocks.changes`, and `num_dirty` then

    @property
    def num_free(self) -> int:
        """Number of slots that can be taken without anything leaving."""
        return 0 if self._is_quarantined else self._slots.num_free

    @property
    def num_usable(self) -> int:
        """Number of slots that blocks may lie in."""
        return 0 if self._is_quarantined else self.num_slots

    @property
    def num_dirty(self) -> int:
        """Number of blocks here that are still to be written to disk."""
        if not self.is_on:
            return 0
        if self._counted[0] != self._dirty.changes:
            rows = (self._table.get(key) for keys in self._dirty.sessions.values() for key in keys)
            self._counted = self._dirty.changes, sum(row is not None and row.coded is not None for row in rows)
        return self._counted[1]

    def take_slot(self, newcomer: SessionName | None) -> int | None:
        """Take a slot to fill; None if there is none. If none is free, a block leaves for it: with a newcomer, only one
        that should leave before a block of that session."""
        if self._is_quarantined:
            return None
        if not self._slots.num_free and self.resident:
            self.make_room(1, newcomer)
        return self._slots.take()

    def give_back(self, slot: int) -> None:
        """Give back a slot that is not needed for what it was taken for."""
        self._slots.give_back(slot)

    def pin(self, slot: int) -> None:
        """Keep a slot's bytes until `unpin`, because they are being read."""
        self._slots.pin(slot)

    def unpin(self, slot: int) -> None:
        self._slots.unpin(slot)

    def attach(self, row: BlockRow, slot: int) -> None:
        """Record that a block, which was in no coded slot, is complete in this one."""
        if self._is_quarantined:  # it was on its way when that began
            self._slots.give_back(slot)
            return
        row.coded = slot
        self._table.moved()
        self._dirty.changes += 1
        self.resident += 1
        enter(self.policy, row)

    def keep(self, key: BlockKey, slot: int) -> None:
        """Keep a block that passed through this slot on its way from below, if it is still wanted."""
        row = self._table.get(key)
        if row is not None and row.coded is None and (row.extent is not None or row.redis is not None):
            self.attach(row, slot)
        else:
            self._slots.give_back(slot)

    def _is_immovable(self, key: BlockKey) -> bool:
        """Whether a block must not leave now: it is being read, is not on disk yet, or is pinned by its owner."""
        row = self._table.get(key)
        if row is None or row.coded is None or self._slots.is_pinned(row.coded):
            return True
        return (row.extent is None and self._dirty.hold(row)) or self._pinned.own(row)

    def make_room(self, count: int, newcomer: SessionName | None) -> None:
        """Let `count` blocks leave, or as many as may. newcomer: see `take_slot`."""
        for key in self.policy.victims(count, self._immovable, newcomer=newcomer):
            row = self._table.get(key)
            assert row is not None
            self.drop_slot(row)
            self._stats.evictions["dram"] += row.slot is None
            if row.is_nowhere:
                self._table.forget(row)

    def drop_slot(self, row: BlockRow) -> None:
        """Take a block out of its coded slot. Does not check whether it is anywhere else."""
        if row.coded is None:
            return
        slot, row.coded = row.coded, None
        self._table.moved()
        self._dirty.changes += 1
        self.resident -= 1
        self.policy.remove(row.key)
        if row.slot is None:
            self._dirty.left_dram(row)
        self._slots.give_back(slot)

    def quarantine(self) -> None:
        """See `Hierarchy.quarantine`."""
        for row in list(self._table):
            self.drop_slot(row)
            if row.is_nowhere:
                self._table.forget(row)
        self._is_quarantined = True

    def condemn(self) -> None:
        """Use the codec no more in this process. `Matcher`, `Encoder` and `WriteBehind` ask for `is_condemned`."""
        self.is_condemned = True
        self.quarantine()
