"""Keeps account of DRAM: what fills its slots, what stays in them, and what leaves. Touches no bytes.

Blocks are saved in slots while they are computed (AttentionStore §3.2.2). The slots are one pool (`slots.py`):
`dram_slots` of them may stay, the rest is for what passes through on its way to disk or was refused. A slot is free
again only when the last copy into or out of it is done, which is what pins and tickets are for.

Where KV is coded, a block is encoded before it leaves, if it may be, and stays in DRAM so (`coded.py`, `encoder.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import FillFromPage, FillFromSlot, Orders, SealSlot
from reprise.cache.policies.eviction_policy import EvictionPolicy, enter
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.coded import CodedTier
from reprise.cache.tiers.holds import DirtyBlocks, KeysWhere, PinnedSessions
from reprise.cache.tiers.pages import PageAllocator
from reprise.cache.tiers.slots import SlotPool

_BATCHES = 64
_PRESSURE = 0.25  # share of the slots that are free or may become so; below it running turns write theirs too


@dataclass(slots=True)
class _Ticket:
    """A save under way: its slot, and the row that its block will have. row None: the slot is only given back."""

    row: BlockRow | None
    slot: int


class DramTier:
    """Single-threaded, part of the CacheManager. With no slots everything is a no-op."""

    def __init__(
        self,
        *,
        table: CacheTable,
        pages: PageAllocator,
        num_slots: int,
        dram_slots: int,
        slot_bytes: int,
        free_buffer: float,
        coded: CodedTier,
        policy: EvictionPolicy,
        pinned: PinnedSessions,
        dirty: DirtyBlocks,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        """free_buffer: the share of `dram_slots` that `trim` leaves free, so that room is made before it is needed."""
        self.num_slots, self.dram_slots, self.slot_bytes = num_slots, dram_slots, slot_bytes
        self.is_on = num_slots > 0
        self.most_resident = int(dram_slots * (1 - free_buffer))  # blocks that `trim` leaves here
        self.batch = dram_slots // _BATCHES
        """Where KV is coded, so many blocks leave or are encoded at once: who leaves next stands behind all the blocks
        that are never coded."""
        self.policy = policy
        self.resident = 0  # slots that hold a block of the table
        self._table, self._pages, self._stats = table, pages, stats
        self._pinned, self._dirty, self._orders = pinned, dirty, orders
        self._coded = coded
        self._slots = SlotPool(num_slots)
        self._is_quarantined = False
        self._tickets: dict[int, _Ticket] = {}
        self._saving: dict[BlockKey, int] = {}  # key -> its ticket
        self._sources: dict[int, tuple[list[int], list[int]]] = {}  # slot being filled -> pages and slots it comes from
        self._immovable = KeysWhere(self._is_immovable)
        self._not_covered = KeysWhere(self._is_not_covered)

    @property
    def is_pressed(self) -> bool:
        """Whether slots are scarce, so that running turns write what they have too. A DRAM full of blocks that are on
        disk is not pressed, because those leave for whatever comes."""
        return self.num_slots - self._unwritten < _PRESSURE * self.num_slots

    @property
    def room_bytes(self) -> int:
        """C_mem: bytes of rows that DRAM may keep of turns to come, coded or not. `trim` leaves so many there, less
        what has to stay until it is on disk. Staging slots keep nothing."""
        coded = max(0, self._coded.num_usable - self._coded.num_dirty)
        return (max(0, self.most_resident - self._unwritten) + coded) * self.slot_bytes

    @property
    def _unwritten(self) -> int:
        """Number of blocks that are not on disk yet or still being saved, and lie in no coded slot either."""
        return len(self._tickets) + self._dirty.num_blocks - self._coded.num_dirty

    @property
    def in_flight(self) -> int:
        """Saves under way."""
        return len(self._tickets)

    @property
    def num_free(self) -> int:
        """Number of slots that can be taken without anything leaving."""
        return self._slots.num_free

    @property
    def reached(self) -> int:
        """Number of leading slots that may have been filled; the others never were."""
        return self._slots.reached

    # --- slots --------------------------------------------------------------------------------------------------------

    def take_slot(self, newcomer: SessionName | None) -> int | None:
        """Take a slot to fill; None if there is none. If none is free, a block leaves DRAM for it: with a newcomer,
        only one that should leave before a block of that session."""
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
        """Record that a block, which was in no slot, is complete in this one."""
        row.slot = slot
        self._table.moved()
        self.resident += 1
        enter(self.policy, row)

    def keep(self, key: BlockKey, slot: int) -> None:
        """Keep a block that passed through this slot on its way from below, if it is still wanted."""
        row = self._table.get(key)
        if row is not None and row.slot is None and (row.extent is not None or row.redis is not None):
            self.attach(row, slot)
        else:
            self._slots.give_back(slot)

    # --- saving -------------------------------------------------------------------------------------------------------

    def is_saving(self, key: BlockKey) -> bool:
        return key in self._saving

    def slot_of(self, row: BlockRow) -> int | None:
        """Return the slot that has a block's rows for every order from now on: they may be on their way to it."""
        ticket = self._saving.get(row.key) if row.slot is None else None
        return row.slot if ticket is None else self._tickets[ticket].slot

    def fill_from_slot(self, source: int, slot: int, num_rows: int) -> None:
        """Order the first rows of `slot` to be copied from another slot, which keeps its bytes until then."""
        self._slots.pin(source)
        self._sources.setdefault(slot, ([], []))[1].append(source)
        self._orders.add(FillFromSlot(source, slot, num_rows))

    def fill_from_page(self, move: FillFromPage) -> None:
        """Order rows of a slot to be copied out of a page, which stays pinned until then."""
        self._pages.pin(move.page)
        self._sources.setdefault(move.slot, ([], []))[0].append(move.page)
        self._orders.add(move)

    def seal(self, slot: int, row: BlockRow | None, num_rows: int) -> None:
        """Order a slot to be sealed, after all that fills it. row: for the table, its addresses ignored; None: give
        back."""
        ticket = self._orders.next_job()
        self._tickets[ticket] = _Ticket(row, slot)
        if row is not None:
            self._saving[row.key] = ticket
        self._orders.add(SealSlot(ticket, slot, num_rows if row is not None else 0))

    def cancel_save(self, key: BlockKey) -> None:
        """Keep nothing of a block that is being saved."""
        ticket = self._saving.pop(key, None)
        if ticket is not None:
            self._dirty.changes += 1
            self._tickets[ticket].row = None

    def on_saved(self, ticket_id: int) -> None:
        """Record that a slot is sealed: its block is in DRAM now, and is to be written to disk."""
        self._dirty.changes += 1
        ticket = self._tickets.pop(ticket_id)
        pages, slots = self._sources.pop(ticket.slot, ([], []))
        for slot in slots:
            self._slots.unpin(slot)
        for page in pages:
            self._pages.unpin(page)
        if ticket.row is None:
            self._slots.give_back(ticket.slot)
            return
        row = ticket.row
        del self._saving[row.key]
        known = self._table.get(row.key)
        if known is None:
            row.page = row.slot = row.coded = row.extent = None
            self.attach(row, ticket.slot)
            self._table.publish(row)
            known = row
        elif known.slot is None:
            self.attach(known, ticket.slot)
        else:
            self._slots.give_back(ticket.slot)
            return
        if known.extent is None and known.owners:
            self._dirty.add(known)

    def owners_saving(self) -> set[SessionName]:
        """Return the sessions of which blocks are being saved."""
        rows = (self._tickets[ticket].row for ticket in self._saving.values())
        return {owner for row in rows if row is not None for owner in row.owners}

    def disown_saves(self, name: SessionName) -> None:
        """Take a session that is gone off the owners of blocks that are being saved."""
        for ticket in self._tickets.values():
            if ticket.row is not None and name in ticket.row.owners:
                ticket.row.owners = tuple(owner for owner in ticket.row.owners if owner != name)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _is_immovable(self, key: BlockKey) -> bool:
        """Whether a block must not leave its slot now: it is being read, is to be encoded, is not on disk yet, or is
        pinned by its owner."""
        row = self._table.get(key)
        if row is None or row.slot is None or self._slots.is_pinned(row.slot):
            return True
        return row.coded is None and (self.awaits_coding(row) or self._is_held(row))

    def _is_held(self, row: BlockRow) -> bool:
        return (row.extent is None and self._dirty.hold(row)) or self._pinned.own(row)

    def _is_not_covered(self, key: BlockKey) -> bool:
        row = self._table.get(key)
        return row is None or row.coded is None or self._is_immovable(key)

    def awaits_coding(self, row: BlockRow) -> bool:
        """Whether a block is to be encoded before it leaves. What is on disk was encoded when it was written, if it may
        be; what came out of a codec never is."""
        codes = self._coded.is_on and not self._coded.is_condemned
        may_be = codes and not (row.is_open or row.decoded or row.kept_raw)
        return may_be and row.coded is None and row.extent is None and row.redis is None

    def trim(self) -> None:
        """Let blocks leave DRAM, in the policy's order, until it is within its bounds. Called once for all that a step
        has saved, because finding victims means walking past all that is queued. Where KV is coded, only rows leave
        that a coded slot has too; `Encoder.plan` does the rest."""
        if self._coded.is_on:
            if (excess := self.resident - self.most_resident) > 0:
                self._leave_covered(max(excess, self.batch))
            return
        while (excess := self.resident - self.most_resident) > 0 and self.make_room(excess, None):
            pass

    def make_room(self, count: int, newcomer: SessionName | None) -> bool:
        """Let `count` blocks leave, or as many as may: with a newcomer, only those that should leave before a block of
        that session. Returns False if none may."""
        covered = self._leave_covered(count) if self._coded.is_on else 0
        if covered >= count:
            return True
        victims = self.policy.victims(count - covered, self._immovable, newcomer=newcomer)
        self.evict(row for key in victims if (row := self._table.get(key)) is not None)
        return bool(covered or victims)

    def _leave_covered(self, count: int) -> int:
        """Let up to `count` rows leave of which a coded slot has the block too: nothing leaves DRAM. Returns how
        many."""
        victims = self.policy.victims(count, self._not_covered) if count > 0 else []
        self.evict(row for key in victims if (row := self._table.get(key)) is not None)
        return len(victims)

    def evict(self, rows: Iterable[BlockRow]) -> None:
        """Let these blocks leave, unless they must not."""
        for row in rows:
            if row.slot is None or self._slots.is_pinned(row.slot) or (row.coded is None and self._is_held(row)):
                continue
            self.drop_slot(row)
            self._stats.evictions["dram"] += row.coded is None
            if row.is_nowhere:
                self._table.forget(row)

    def drop_slot(self, row: BlockRow) -> None:
        """Take a block out of DRAM. Does not check whether it is anywhere else."""
        if row.slot is None:
            return
        slot, row.slot = row.slot, None
        self._table.moved()
        self.resident -= 1
        self.policy.remove(row.key)
        if row.coded is None:
            self._dirty.left_dram(row)
        self._slots.give_back(slot)

    def quarantine(self) -> None:
        """Stop using DRAM in this process and believe nothing in it, because what came out of it was wrong although it
        was intact."""
        for row in list(self._table):
            self.drop_slot(row)
            if row.is_nowhere:
                self._table.forget(row)
        self._is_quarantined = True
