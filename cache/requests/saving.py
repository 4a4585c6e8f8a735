"""Saves blocks from the pages they are computed in to DRAM slots (AttentionStore §3.2.2)."""

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.table import BlockRow
from reprise.cache.moves import CapturePiece, FillFromPage
from reprise.cache.requests.context import RequestContext
from reprise.cache.tiers.hbm import MAX_HOPS
from reprise.cache.tiers.hierarchy import Hierarchy


class Saver:
    """A part that takes DRAM slots for blocks while they are computed, and orders their rows to be saved there. The
    Lifecycle and the Publisher call it, on the engine's thread."""

    def __init__(self, *, tiers: Hierarchy, only_as_computed: bool) -> None:
        """Set up. only_as_computed: whether rows are saved only while they are computed, never from a page. That is so
        because un-rotating their keys would round them once more, or because activations are saved instead of KV."""
        self._table, self._pages = tiers.table, tiers.pages
        self._rows, self._saves = tiers.dram.rows, tiers.dram.saves
        self._page_size, self._only_as_computed = tiers.hbm.page_size, only_as_computed
        # Blocks for which there was no slot, the longest waiting first. Some may have left HBM since.
        self.put_off: dict[BlockKey, None] = {}

    def capture(self, context: RequestContext, num_tokens: int, batch_row: int) -> list[CapturePiece]:
        """Return where to save the KV of the next `num_tokens` rows, which a step computes as the rows of its batch
        from `batch_row` on."""
        if not self._rows.is_on:
            return []
        pieces = []
        end = context.rows.computed + num_tokens
        for block in range(context.rows.computed // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            first = block * BLOCK_TOKENS
            start, stop = max(context.rows.computed, first), min(end, first + BLOCK_TOKENS)
            slot = context.saving.slots.get(block)
            if slot is None and block not in context.saving.unsaved:
                slot = self._begin_save(context, block, start - first)
            if slot is not None:
                pieces.append(
                    CapturePiece(batch_row + start - context.rows.computed, slot, start - first, stop - start)
                )
        return pieces

    def _begin_save(self, context: RequestContext, block: int, rows_before: int) -> int | None:
        """Take a slot for a block that is being computed, and order the rows that it already has to be saved there.
        Returns the slot; None if the block is not saved while it is computed."""
        older = self._table.get(context.reuse.open_hint) if context.reuse.open_hint is not None else None
        if rows_before and self._only_as_computed and self._source(older) is None:
            context.saving.unsaved.add(block)
            return None
        slot = self._rows.take_slot(None)
        if slot is not None and rows_before and self._only_as_computed and self._source(older) is None:
            # The older rows have just left DRAM to make room for this slot.
            self._rows.give_back(slot)
            slot = None
        if slot is None:
            context.saving.unsaved.add(block)
            return None
        context.saving.slots[block] = slot
        if rows_before:
            if (source := self._source(older)) is not None:
                self._saves.fill_from_slot(source, slot, rows_before)
            else:
                self._fill_from_page(context, block, slot, 0, rows_before)
        return slot

    def _source(self, older: BlockRow | None) -> int | None:
        """Return the slot with the rows of an older block; None if there is no such slot. The rows may still be on
        their way into the slot, but will be there before any later order is carried out."""
        if older is None:
            return None
        return self._saves.slot_of(older) if self._only_as_computed else older.copies.get("dram")

    def _fill_from_page(self, context: RequestContext, block: int, slot: int, first: int, num_rows: int) -> None:
        row = block * BLOCK_TOKENS + first
        page = context.rows.pages[row // self._page_size]
        self._saves.fill_from_page(FillFromPage(page, row % self._page_size, slot, first, num_rows, row))

    def seal(self, context: RequestContext, block: int, row: BlockRow | None, num_rows: int) -> None:
        """Mark the slot of a block as complete, because the block is full, or because its context has ended before
        that. row: the block's row in the table; None: give the slot back."""
        context.saving.unsaved.discard(block)
        slot = context.saving.slots.pop(block, None)
        if slot is None:
            if row is not None and self._rows.is_on:
                self._save_later(row.key)
            return
        known = self._table.get(row.key) if row is not None else None
        wanted = (
            row is not None and not self._saves.is_saving(row.key) and (known is None or "dram" not in known.copies)
        )
        self._saves.seal(slot, row.unstored() if row is not None and wanted else None, num_rows)

    def save_late(self, context: RequestContext, block: int) -> None:
        """Save a block from its page, because it found no slot while it was computed: now if a slot is free, otherwise
        later."""
        row = self._table.get(context.keys[block])
        if row is None or not self._rows.is_on or not context.rows.is_trusted or not self._is_wanted(row):
            return
        slot = self._rows.take_slot(context.session)
        if slot is None:
            self._save_later(row.key)
        else:
            self._save(row, slot)

    def catch_up(self) -> None:
        """Save blocks for which no DRAM slot was free before, as far as slots are free now."""
        while self.put_off and self._rows.num_free:
            key = next(iter(self.put_off))
            row = self._table.get(key)
            if row is not None and self._is_wanted(row):
                slot = self._rows.take_slot(None)
                if slot is None:
                    return
                self._save(row, slot)
            del self.put_off[key]

    def _save_later(self, key: BlockKey) -> None:
        self.put_off[key] = None
        if len(self.put_off) > self._pages.num_pages * self._page_size // BLOCK_TOKENS:
            del self.put_off[next(iter(self.put_off))]  # more than HBM holds: some have left

    def _is_wanted(self, row: BlockRow) -> bool:
        # Rows that came out of a codec are not saved again: the copy would not tell that they did.
        saved = row.is_saved or self._saves.is_saving(row.key) or row.decoded
        return row.page is not None and not saved and not self._only_as_computed and row.hops < MAX_HOPS

    def _save(self, row: BlockRow, slot: int) -> None:
        """Order a block to be saved from its page, whichever request runs on that page."""
        assert row.page is not None
        num_rows, saved = len(row.token_ids), row.unstored()
        saved.hops += 1
        self._saves.fill_from_page(FillFromPage(row.page, row.offset, slot, 0, num_rows, row.position))
        self._saves.seal(slot, saved, num_rows)

    def abandon(self, context: RequestContext) -> None:
        """Give back the DRAM slots that were taken for blocks of a context which were not completed."""
        for slot in context.saving.slots.values():
            self._saves.seal(slot, None, 0)
        context.saving.slots, context.saving.unsaved = {}, set()
