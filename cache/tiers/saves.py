"""Records every save under way: which rows fill which DRAM slot, and which block requests can find once the slot is
complete (AttentionStore §3.2.2). Touches no bytes."""

from dataclasses import dataclass

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import FillFromPage, FillFromSlot, Orders, SealSlot
from reprise.cache.tiers.holds import DirtyBlocks
from reprise.cache.tiers.pages import PageAllocator
from reprise.cache.tiers.slot_tier import SlotTier


@dataclass(slots=True)
class _Ticket:
    """A save under way: its slot, and the table row that its block will have. row None: the slot is given back when the
    save ends, because the block is not wanted any more."""

    row: BlockRow | None
    slot: int


class Saves:
    """The saves under way: copies of KV rows into the DRAM slots for uncompressed blocks. The Saver orders saves and
    the CacheManager reports their end, on the engine's thread."""

    def __init__(
        self, *, table: CacheTable, pages: PageAllocator, rows: SlotTier, dirty: DirtyBlocks, orders: Orders
    ) -> None:
        self._table, self._pages, self._rows = table, pages, rows
        self._dirty, self._orders = dirty, orders
        self._tickets: dict[int, _Ticket] = {}
        self._saving: dict[BlockKey, int] = {}  # key -> its ticket
        self._sources: dict[int, tuple[list[int], list[int]]] = {}  # slot being filled -> pages and slots it comes from

    @property
    def in_flight(self) -> int:
        """The number of saves under way."""
        return len(self._tickets)

    def is_saving(self, key: BlockKey) -> bool:
        return key in self._saving

    def slot_of(self, row: BlockRow) -> int | None:
        """Return the slot that has a block's rows, or will have them before any later order is carried out; None if
        there is none."""
        slot = row.copies.get("dram")
        ticket = self._saving.get(row.key) if slot is None else None
        return slot if ticket is None else self._tickets[ticket].slot

    def fill_from_slot(self, source: int, slot: int, num_rows: int) -> None:
        """Order the first rows of `slot` to be copied from the slot `source`, which stays pinned until the save has
        ended."""
        self._rows.pin(source)
        self._sources.setdefault(slot, ([], []))[1].append(source)
        self._orders.add(FillFromSlot(source, slot, num_rows))

    def fill_from_page(self, move: FillFromPage) -> None:
        """Order rows to be copied from a page to a slot. The page stays pinned until the save has ended."""
        self._pages.pin(move.page)
        self._sources.setdefault(move.slot, ([], []))[0].append(move.page)
        self._orders.add(move)

    def seal(self, slot: int, row: BlockRow | None, num_rows: int) -> None:
        """Order a slot to be marked as complete, after everything that fills it. row: the block's row for the table,
        without an address (`BlockRow.unstored`); None: give the slot back instead."""
        ticket = self._orders.next_job()
        self._tickets[ticket] = _Ticket(row, slot)
        if row is not None:
            self._saving[row.key] = ticket
        self._orders.add(SealSlot(ticket, slot, num_rows if row is not None else 0))

    def cancel(self, key: BlockKey) -> None:
        """Stop waiting for the save of a block, which is not wanted any more: the block does not enter DRAM, and its
        slot is given back when the copy has ended. Does nothing if the block is not being saved."""
        ticket = self._saving.pop(key, None)
        if ticket is not None:
            self._dirty.changes += 1
            self._tickets[ticket].row = None

    def on_saved(self, ticket_id: int) -> None:
        """Record that a slot is complete. From now on its block is in DRAM and, if it has an owner and is not on disk,
        is to be written there. But if the save was cancelled, DRAM has the block already, or DRAM was quarantined (is
        no longer used), only the slot is given back."""
        self._dirty.changes += 1
        ticket = self._tickets.pop(ticket_id)
        pages, slots = self._sources.pop(ticket.slot, ([], []))
        for slot in slots:
            self._rows.unpin(slot)
        for page in pages:
            self._pages.unpin(page)
        if ticket.row is None:
            self._rows.give_back(ticket.slot)
            return
        row = ticket.row
        del self._saving[row.key]
        known = self._table.get(row.key)
        if known is not None and "dram" in known.copies:
            self._rows.give_back(ticket.slot)
            return
        stays = self._rows.attach(known or row, ticket.slot)
        if known is None and stays:
            self._table.publish(row)
        known = known or row
        if stays and "disk" not in known.copies and known.owners:
            self._dirty.add(known)

    def owners(self) -> set[SessionName]:
        """Return the sessions whose blocks are being saved."""
        rows = (self._tickets[ticket].row for ticket in self._saving.values())
        return {owner for row in rows if row is not None for owner in row.owners}

    def disown(self, name: SessionName) -> None:
        """Remove a session that is gone from the owners of blocks that are being saved."""
        for ticket in self._tickets.values():
            if ticket.row is not None and name in ticket.row.owners:
                ticket.row.owners = tuple(owner for owner in ticket.row.owners if owner != name)
