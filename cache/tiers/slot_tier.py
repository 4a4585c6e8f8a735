"""Keeps account of blocks in DRAM slots of one size: which slot has which block, and which blocks are evicted. Touches
no bytes."""

from collections.abc import Iterable
from typing import Literal

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.policies.eviction_policy import EvictionPolicy, enter
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.holds import Holds, KeysWhere
from reprise.cache.tiers.slots import SlotPool


class SlotTier:
    """The ledger of one part of DRAM: the slots for uncompressed blocks, that is rows of KV (`dram`), or with a codec
    those for compressed blocks (`coded`). Dram and the CacheManager's other parts call it, on the engine's thread. With
    no slots everything is a no-op.

    A block may be in both. Then its rows, which no codec has changed, are loaded. They can be evicted without a loss
    when their slot is wanted, because the compressed copy covers them.
    """

    def __init__(
        self,
        name: Literal["dram", "coded"],
        slots: SlotPool,
        *,
        most_resident: int,
        covered_by: Literal["coded"] | None,
        table: CacheTable,
        policy: EvictionPolicy,
        holds: Holds,
        stats: CacheStats,
    ) -> None:
        """Set up. name: "dram" for slots of rows, "coded" for slots of compressed blocks. most_resident: how many
        blocks may stay in this tier; further slots are for blocks that are only on their way to disk. covered_by: the
        tier of slots that may have the same blocks, so that they are evicted from here first; None: there is none."""
        self.name: Literal["dram", "coded"] = name
        self._slots = slots
        self.num_slots, self.slot_bytes = slots.num_slots, slots.slot_bytes
        self.is_on = slots.num_slots > 0
        self.most_resident = most_resident
        self.policy = policy
        self.resident = 0  # slots that hold a block of the table
        self.changes = 0  # number of times a block has come or left
        self._covered_by = covered_by
        self._table, self._holds, self._stats = table, holds, stats
        self._keeps = holds.keep_rows if name == "dram" else holds.keep
        self._is_quarantined = False
        self._immovable = KeysWhere(self._is_immovable)
        self._not_covered = KeysWhere(self._is_not_covered)

    @property
    def num_free(self) -> int:
        """The number of slots that can be taken without evicting a block."""
        return 0 if self._is_quarantined else self._slots.num_free

    @property
    def num_usable(self) -> int:
        """The number of slots, free or not; 0 after the tier was quarantined (no longer used, because it gave wrong
        results)."""
        return 0 if self._is_quarantined else self.num_slots

    @property
    def reached(self) -> int:
        """The number of slots from the first to the last that was ever taken; those after it were never used."""
        return self._slots.reached

    def bytes_of(self, row: BlockRow) -> int:
        """Return the bytes that a block takes in this tier."""
        return row.size_bytes if self.name == "dram" else self.slot_bytes

    # --- slots --------------------------------------------------------------------------------------------------------

    def take_slot(self, newcomer: SessionName | None) -> int | None:
        """Return a slot to fill; if none is free, evict a block for it. newcomer: the session whose block needs the
        slot; a block is evicted only if it should leave before a block of this session, or if the tier `covered_by` has
        a copy of it. None: any may be evicted. Returns None if no slot is free and no block may leave."""
        if self._is_quarantined:
            return None
        if not self._slots.num_free and self.resident:
            self.make_room(1, newcomer)
        return self._slots.take()

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken and is not needed any more."""
        self._slots.give_back(slot)

    def pin(self, slot: int) -> None:
        """Keep a slot's bytes until `unpin`, because they are being read."""
        self._slots.pin(slot)

    def unpin(self, slot: int) -> None:
        self._slots.unpin(slot)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def attach(self, row: BlockRow, slot: int) -> bool:
        """Record that a block, which was in no slot of this tier, is complete in `slot`. Returns False if the slot was
        given back instead, because the tier was quarantined meanwhile."""
        if self._is_quarantined:
            self._slots.give_back(slot)
            return False
        row.copies[self.name] = slot
        self._table.moved()
        self.changes += 1
        self.resident += 1
        enter(self.policy, row)
        return True

    def keep(self, key: BlockKey, slot: int) -> None:
        """Store a block that was loaded from a lower tier through this slot, if it is still wanted; otherwise free the
        slot."""
        row = self._table.get(key)
        if row is not None and self.name not in row.copies and row.is_below_dram:
            self.attach(row, slot)
        else:
            self._slots.give_back(slot)

    def touch(self, row: BlockRow) -> None:
        """Record a hit of a block that is in this tier."""
        self.policy.touch(row.key)

    def drop(self, row: BlockRow) -> None:
        """Remove a block from its slot. Does not check whether another tier has it."""
        slot = row.copies.pop(self.name, None)
        if slot is None:
            return
        self._table.moved()
        self.changes += 1
        self.resident -= 1
        self.policy.remove(row.key)
        if not row.in_dram:
            self._holds.dirty.left_dram(row)
        self._slots.give_back(slot)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _is_immovable(self, key: BlockKey) -> bool:
        """Return whether a block must not leave its slot now, because it is being read or `Holds` keeps it."""
        row = self._table.get(key)
        slot = None if row is None else row.copies.get(self.name)
        if row is None or slot is None or self._slots.is_pinned(slot):
            return True
        return self._keeps(row)

    def _is_covered(self, row: BlockRow) -> bool:
        return self._covered_by is not None and self._covered_by in row.copies

    def _is_not_covered(self, key: BlockKey) -> bool:
        row = self._table.get(key)
        return row is None or not self._is_covered(row) or self._is_immovable(key)

    def make_room(self, count: int, newcomer: SessionName | None) -> bool:
        """Evict `count` blocks, or as many as may leave: first those of which the tier `covered_by` has a copy too.
        newcomer: the session whose block needs the room; of the other blocks only those are evicted that should leave
        before a block of this session. None: any may be evicted. Returns whether at least one block was evicted."""
        covered = self.leave_covered(count)
        if covered >= count:
            return True
        victims = self.policy.victims(count - covered, self._immovable, newcomer=newcomer)
        self.evict(row for key in victims if (row := self._table.get(key)) is not None)
        return bool(covered or victims)

    def leave_covered(self, count: int) -> int:
        """Evict up to `count` blocks of which the tier `covered_by` has a copy too, so that no block leaves DRAM.
        Returns how many were evicted."""
        if self._covered_by is None or count <= 0:
            return 0
        victims = self.policy.victims(count, self._not_covered)
        self.evict(row for key in victims if (row := self._table.get(key)) is not None)
        return len(victims)

    def evict(self, rows: Iterable[BlockRow]) -> None:
        """Evict these blocks, except those that are being read, are still to be written, or are pinned."""
        for row in rows:
            slot = row.copies.get(self.name)
            if slot is None or self._slots.is_pinned(slot) or (not self._is_covered(row) and self._holds.keep(row)):
                continue
            self.drop(row)
            self._stats.evictions["dram"] += not row.in_dram
            if row.is_nowhere:
                self._table.forget(row)

    def quarantine(self) -> None:
        """Stop using this tier in this process, and everything in it, because it gave wrong results although the
        checksums were right."""
        for row in list(self._table):
            self.drop(row)
            if row.is_nowhere:
                self._table.forget(row)
        self._is_quarantined = True
