"""Lets a context run that HBM cannot hold. Its older blocks are parked: they have no page and are read from their DRAM
slots (docs/decisions/0024-parked-blocks.md)."""

import math
from collections.abc import Iterable
from itertools import islice

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.match import Match
from reprise.cache.blocks.rows import PARKED
from reprise.cache.blocks.table import BlockRow
from reprise.cache.requests.context import RequestContext, SlotBlock
from reprise.cache.tiers.hierarchy import Hierarchy

# The longest wait for slots or saves. Both come in milliseconds, unless pinned sessions fill DRAM or a disk hangs.
_PATIENCE_S = 30.0


def chunk_pages(most_pages: int) -> int:
    """Return how many pages one chunk may fill of a context that has at most `most_pages` in HBM. The previous chunk,
    which may still be being saved, needs as many. Each of the two chunks may need one page more, because it begins
    inside of a page."""
    return max(1, (most_pages - 2) // 2)


class Parking:
    """A manager of contexts that HBM cannot hold: it makes room by parking their older blocks in DRAM. The Placer, the
    SchedulerView and the engine's loop call it, on the engine's thread. Only one such context has room at a time, so
    that no two wait for each other's slots."""

    def __init__(self, *, tiers: Hierarchy, most_pages: int) -> None:
        """Set up. most_pages: the most HBM pages that one context larger than HBM may have; 0: every context has to fit
        HBM."""
        self.now = -math.inf
        """Time of the last plan, in seconds. The CacheManager sets it."""
        self._tiers = tiers
        self._table, self._pages, self._hbm, self._rows = tiers.table, tiers.pages, tiers.hbm, tiers.dram.rows
        self._most_pages, self._chunk_pages = most_pages, chunk_pages(most_pages)
        self._per_page = tiers.hbm.page_size // BLOCK_TOKENS
        # The pages that a context's first rows are copied from may be needed beside its own.
        self._whole_tokens = (tiers.pages.num_pages - self._per_page) * tiers.hbm.page_size
        # Read in every step, and so without a call.
        self.is_on = most_pages > 0
        """Whether contexts may be larger than HBM."""
        self.owner: RequestContext | None = None
        """The one context that has room although HBM cannot hold it. Its saves are urgent, because a page can be parked
        only when it is saved."""
        self.hopeless: dict[str, None] = {}
        """Requests that have waited for room too long, and that `take_hopeless` has not returned yet."""
        # The context that waits for slots or saves, and since when.
        self._waiting: tuple[RequestContext, float] | None = None

    def needs(self, num_tokens: int) -> bool:
        """Return whether a context of `num_tokens` tokens is too large for HBM and may be parked in part."""
        return self.is_on and num_tokens > self._whole_tokens

    def concerns(self, context: RequestContext, num_tokens: int) -> bool:
        """Return whether a context that has pages is larger than HBM, or would be with `num_tokens` more rows. If so,
        `Parking.grow` makes room for these rows, not the HBM pool."""
        return context is self.owner or self.needs(context.rows.computed + num_tokens)

    @property
    def waits(self) -> bool:
        """Return whether the one context that is larger than HBM and has pages waits for DRAM slots or saves. While it
        waits, it takes part in no step."""
        return self._waiting is not None and self._waiting[0] is self.owner

    def take_hopeless(self) -> list[str]:
        """Return, each once, the ids of requests whose contexts are larger than HBM and have waited too long (30 s) for
        DRAM slots or saves. The caller has to end them with an error."""
        hopeless, self.hopeless = list(self.hopeless), {}
        return hopeless

    # --- waiting contexts ---------------------------------------------------------------------------------------------

    def fetch(self, context: RequestContext) -> None:
        """Order that the blocks on disk and in Redis of a waiting context that HBM cannot hold be fetched into DRAM,
        from which parked blocks are read. Does so once for each context; does nothing for a smaller one."""
        if context.waiting.was_fetched or context.reuse.skips_disk or not self.needs(len(context.token_ids)):
            return
        context.waiting.was_fetched = True
        self._tiers.fetches.fetch(self._table.matched(context.chain()), context.session)

    def usable(self, match: Match) -> Match:
        """Return the leading part of a match that a context larger than HBM can use. Its blocks without a DRAM slot
        need pages, and so does the chunk of the prompt that a step computes. The match is cut where there would be no
        page left for them."""
        room = self._most_pages - self._chunk_pages - 1
        for start in range(0, len(match.rows) - self._per_page + 1, self._per_page):
            room -= any("dram" not in row.copies for row in match.rows[start : start + self._per_page])
            if room < 0:
                return match.first(start)
        return match

    def begin(self, context: RequestContext, match: Match, pages_needed: int) -> set[int] | None:
        """Pin the slots of a waiting context's stored blocks, and take others for what it computes next. Returns the
        numbers of those of its pages that are parked from the start. Returns None, and changes nothing, if it has to
        wait."""
        if self.owner is not None:
            return None
        for block, row in enumerate(match.rows):
            self._pin(context, block, row)
        partial = None if match.partial is None else match.partial.copies.get("dram")
        if partial is not None:
            self._rows.pin(partial)  # it may not leave for the slots that are taken
        has_slots = self._take_slots(context, match.num_tokens, pages_needed)
        if partial is not None:
            self._rows.unpin(partial)
        excess = max(0, pages_needed - self._most_pages)
        full = range(len(match.rows) // self._per_page)
        parked = set(islice((page for page in full if self._is_in_slots(context, page)), excess))
        if not has_slots or len(parked) < excess:
            self.withdraw(context)
            self._wait(context)
            return None
        self.owner, self._waiting = context, None
        return parked

    def withdraw(self, context: RequestContext) -> None:
        """Undo `begin`, because HBM has no room for the context's pages: give back the DRAM slots that it
        has taken, and unpin those of its stored blocks."""
        for slot in context.saving.slots.values():
            self._rows.give_back(slot)
        context.saving.slots = {}
        self._unpin(context)

    # --- running contexts ---------------------------------------------------------------------------------------------

    def grow(self, context: RequestContext, num_tokens: int) -> bool:
        """Give a context room for `num_tokens` more rows, although HBM cannot hold all of it. Returns False if there is
        none yet."""
        if context is not self.owner and self.owner is not None:
            return False
        self.owner = context  # it may have begun as a small one
        total = self._hbm.num_pages(context.rows.computed + num_tokens)
        if total <= len(context.rows.pages):
            return True
        for block in range(context.rows.sealed):
            row = self._table.get(context.keys[block])
            if row is not None:
                self._pin(context, block, row)
        self._park(context, total - context.rows.pages.count(PARKED) - self._most_pages)
        if not self._take_slots(context, context.rows.computed, total):
            return self._wait(context)
        if self._hbm.grow(context.rows, num_tokens):
            self._waiting = None
            return True
        is_saving = self._tiers.dram.saves.is_saving
        return self._wait(context) if any(is_saving(key) for key in context.keys[: context.rows.sealed]) else False

    def _park(self, context: RequestContext, count: int) -> None:
        """Park up to `count` pages of a context, the first ones first: give them back and mark them as read from
        DRAM."""
        for index, page in enumerate(context.rows.pages):
            if count <= 0:
                return
            if page != PARKED and self._is_in_slots(context, index):
                self._pages.unpin(page)
                context.rows.pages[index] = PARKED
                count -= 1

    def _is_in_slots(self, context: RequestContext, page: int) -> bool:
        """Return whether all blocks of a context's page can be read from DRAM slots. page: its index in the context."""
        blocks = range(page * self._per_page, (page + 1) * self._per_page)
        return all(block in context.saving.parked and block not in context.rows.moved for block in blocks)

    def _pin(self, context: RequestContext, block: int, row: BlockRow) -> None:
        slot = row.copies.get("dram")
        if slot is not None and block not in context.saving.parked:
            self._rows.pin(slot)
            context.saving.parked[block] = SlotBlock(row.key, slot, block * BLOCK_TOKENS)

    def _take_slots(self, context: RequestContext, computed: int, num_pages: int) -> bool:
        """Take DRAM slots for the blocks that begin after the `computed` rows, up to the end of the context's pages.
        Returns False if there are not enough; the slots that were taken stay taken."""
        for block in range(-(-computed // BLOCK_TOKENS), num_pages * self._per_page):
            if block not in context.saving.slots and block not in context.saving.unsaved:
                slot = self._rows.take_slot(None)
                if slot is None:
                    return False
                context.saving.slots[block] = slot
        return True

    def _wait(self, context: RequestContext) -> bool:
        if self._waiting is None or self._waiting[0] is not context:
            self._waiting = context, self.now
        elif self.now - self._waiting[1] > _PATIENCE_S:
            self.hopeless[context.request_id] = None
        return False

    def lost(self, context: RequestContext, keys: Iterable[BlockKey]) -> None:
        """Forget copies in DRAM that a step found altered when it read them."""
        wrong = {key: block for block, (key, _, _) in context.saving.parked.items()}
        for key in keys:
            row = self._table.get(key)
            if row is not None and row.copies.get("dram") == context.saving.parked[wrong[key]].slot:
                self._tiers.drop_copy(row, "dram")
            self._tiers.stats.load_failures["checksum"] += 1
        context.reuse.miss_reason, context.waiting.was_fetched = "load_failed", False

    def leave(self, context: RequestContext) -> None:
        """Unpin a context's slots, because it gives its pages back."""
        self._unpin(context)
        if self._waiting is not None and self._waiting[0] is context:
            self._waiting = None

    def _unpin(self, context: RequestContext) -> None:
        for _, slot, _ in context.saving.parked.values():
            self._rows.unpin(slot)
        context.saving.parked = {}
        if self.owner is context:
            self.owner = None
