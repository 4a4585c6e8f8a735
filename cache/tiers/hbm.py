"""Keeps account of HBM: its pages, the blocks in them, and which pages a context gets. Touches no bytes."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.match import Match
from reprise.cache.blocks.rows import PARKED, ContextRows
from reprise.cache.blocks.scores import Scores
from reprise.cache.blocks.table import BlockRow, CacheTable
from reprise.cache.moves import BlockLoad, CopyRows
from reprise.cache.options import CacheOptions
from reprise.cache.policies.eviction_policy import EvictionPolicy, enter
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.pages import PageAllocator

_OFFLOAD_BLOCKS = 64  # blocks evicted at a time, well below a millisecond
_MORE_PAGES = 2  # least spare pages of a run, for the answer
_RUN_CHOICE_FACTOR = 4  # blocks examined to find pages in a row: so many times the number that may leave
_MOST_CHOICE_BLOCKS = 512  # most blocks examined to find pages in a row; this takes a millisecond
MAX_HOPS = 4  # un-rotations a key may go through; each costs a rounding of the compute type


@dataclass(slots=True)
class Placement:
    """The copies and loads that have to be made before a context's new pages have its rows."""

    copies: list[CopyRows] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    moved: dict[int, tuple[BlockKey, int]] = field(default_factory=dict)  # block -> (key, page): copied elsewhere
    taken_over: BlockKey | None = None  # an open block that goes on growing where it lies


class _Pinned:
    """A container of the blocks that must not leave HBM: those in a pinned page, those with a score above `most`, and
    with `saved_only` those that are not saved."""

    def __init__(self, table: CacheTable, pages: PageAllocator, most: int, saved_only: bool) -> None:
        self._row_of, self._pages = table.get, pages
        self._most, self._saved_only = most, saved_only

    def __contains__(self, key: object) -> bool:
        # Runs for every block that may leave next, so `Scores.of` is written out.
        row = self._row_of(key)  # type: ignore[arg-type]
        if row is None or row.page is None:
            return False
        if row.score > self._most or (self._saved_only and not row.is_saved):
            return True
        return self._pages.pins(row.page) > 0


class HbmPool:
    """The ledger of HBM: gives pages to contexts and evicts blocks for them. The Placer, the SchedulerView and the
    Publisher call it, on the engine's thread."""

    def __init__(
        self,
        *,
        options: CacheOptions,
        table: CacheTable,
        pages: PageAllocator,
        policy: EvictionPolicy,
        scores: Scores,
        stats: CacheStats,
    ) -> None:
        self.table, self.pages, self.page_size, self.policy = table, pages, options.page_size, policy
        self.bytes_per_token = options.bytes_per_token
        self._stats = stats
        self._scores = scores
        self._has_slots = options.num_slots > 0  # blocks are saved below, so that a block that leaves need not be lost
        high_pages = int(options.hbm_high_water * pages.num_pages)
        self.least_free = pages.num_pages - high_pages if self._has_slots else 0
        """Number of free pages below which `offload` has to free more."""
        self._low_pages = int(options.hbm_low_water * pages.num_pages)

    # --- where a block can be used ------------------------------------------------------------------------------------

    def is_ready(self, row: BlockRow, block: int) -> bool:
        """Return whether a block is in HBM with its keys rotated for the position of the `block`th block of a
        context."""
        return row.page is not None and row.position == block * BLOCK_TOKENS

    def can_move(self, row: BlockRow) -> bool:
        """Return whether HBM's copy of a block may be rotated to another position. It may not if the block is saved,
        because its saved keys, which were never rotated, are loaded instead, nor if it was un-rotated MAX_HOPS
        times."""
        return row.page is not None and not row.is_saved and row.hops < MAX_HOPS

    def _group_by_page(self, match: Match) -> list[list[tuple[BlockRow, int]]]:
        """Split the blocks of a match into those that go to the same page of the new context."""
        used, per_page = match.used, self.page_size // BLOCK_TOKENS
        return [used[start : start + per_page] for start in range(0, len(used), per_page)]

    def _claim(self, group: list[tuple[BlockRow, int]], first_block: int) -> int | None:
        """Return the page in which a group of blocks can be used without a copy; None if it has to be copied or loaded.
        first_block: index of the first one in the context."""
        page = group[0][0].page
        if page is None or any(
            row.page != page or row.offset != place * BLOCK_TOKENS or not self.is_ready(row, first_block + place)
            for place, (row, _) in enumerate(group)
        ):
            return None
        last, used = group[-1]
        whole = len(group) * BLOCK_TOKENS == self.page_size and used == BLOCK_TOKENS and not last.is_open
        if whole:
            return page
        # The context will write after the last row, so no other may run on the page or have a block there.
        grows = (last.is_open and used == len(last.token_ids)) or (not last.is_open and used == BLOCK_TOKENS)
        alone = self.pages.pins(page) == 0 and self.pages.residents(page) == len(group)
        return page if grows and alone else None

    def _claims(self, groups: Sequence[list[tuple[BlockRow, int]]]) -> list[int | None]:
        per_page = self.page_size // BLOCK_TOKENS
        return [self._claim(group, index * per_page) for index, group in enumerate(groups)]

    def usable_in_place(self, match: Match) -> Match:
        """Return the leading part of a match that a new context can use in the pages where it lies, without a copy or a
        load."""
        claims = self._claims(self._group_by_page(match))
        if None not in claims:
            return match
        return match.first(claims.index(None) * self.page_size // BLOCK_TOKENS)

    # --- giving a context its pages -----------------------------------------------------------------------------------

    def place(
        self,
        rows: ContextRows,
        match: Match,
        pages_needed: int,
        num_tokens: int,
        parked: Collection[int] | None = None,
    ) -> Placement | None:
        """Give a context its pages: first those of the match, which are shared, copied or to be loaded, then free
        pages. Returns None, and changes nothing, if there is no room. num_tokens: length of the whole context, whose
        later pages should lie adjacent to these. parked: for a context larger than HBM, the indices of the pages that
        it does without."""
        groups = self._group_by_page(match)
        claimed = self._claims(groups)
        per_page, num_parked = self.page_size // BLOCK_TOKENS, len(parked or ())
        for index in parked or ():
            claimed[index] = PARKED
        # Pages that are only copied from need not stay once the copy is ordered, but must not leave before it is.
        held = [page for page in claimed if page is not None and page != PARKED]
        sources = [
            row.page
            for block, (row, _) in enumerate(match.used)
            if row.page is not None
            and (self.is_ready(row, block) or self.can_move(row))
            and claimed[block // per_page] != PARKED
        ]
        for page in (*held, *sources):
            self.pages.pin(page)
        run = max(pages_needed, self.num_pages(num_tokens))  # room after it for pages of later steps
        if parked is not None:
            run = pages_needed
        if not held and pages_needed - num_parked <= self.pages.num_free + self.pages.num_cached:
            self._make_run(run - num_parked, max(_MORE_PAGES, run // 8))
        placement = Placement() if self.make_room(pages_needed - num_parked - len(held)) else None
        if placement is not None:
            for index, (group, claim) in enumerate(zip(groups, claimed, strict=True)):
                if claim is None:
                    claim = self.pages.take(rows.last_page, run - len(rows.pages))
                    self._bring(group, index * per_page, claim, placement)
                rows.pages.append(claim)
            while len(rows.pages) < pages_needed:
                rows.pages.append(self.pages.take(rows.last_page, run - len(rows.pages)))
            if match.partial is not None and match.partial.is_open and claimed[-1] is not None:
                placement.taken_over = match.partial.key  # the context appends to it where it lies
        for page in sources if placement is not None else (*sources, *held):
            self.pages.unpin(page)
        return placement

    def _bring(self, group: list[tuple[BlockRow, int]], first_block: int, page: int, placement: Placement) -> None:
        for place, (row, used) in enumerate(group):
            block, offset = first_block + place, place * BLOCK_TOKENS
            position = block * BLOCK_TOKENS
            ready = self.is_ready(row, block)
            if ready or self.can_move(row):
                assert row.page is not None
                placement.copies.append(CopyRows(row.page, row.offset, page, offset, used, row.position, position))
                self._stats.copied_rows += used
                if not ready and used == BLOCK_TOKENS and not row.is_open:
                    placement.moved[block] = (row.key, page)
            else:
                target = page, offset, position
                copies, source = row.copies, row.source
                if source == "dram" or source == "coded":
                    load = BlockLoad(row.key, used, copies[source], None, *target, is_coded=source == "coded")
                elif source == "disk":
                    load = BlockLoad(row.key, used, None, copies["disk"], *target)
                else:
                    load = BlockLoad(row.key, used, None, None, *target, copies["redis"])
                placement.loads.append(load)

    def grow(self, rows: ContextRows, num_tokens: int) -> bool:
        """Give a context room for `num_tokens` more rows. Returns False, and changes nothing, if there is none."""
        missing = self.num_pages(rows.computed + num_tokens) - len(rows.pages)
        if missing <= 0:
            return True
        if not self.make_room(missing):
            return False
        for done in range(missing):
            rows.pages.append(self.pages.take(rows.last_page, missing - done))
        return True

    def borrow(self, num_pages: int) -> list[int] | None:
        """Return pinned pages that belong to no context; None if there is no room."""
        if not self.make_room(num_pages):
            return None
        pages: list[int] = []
        for done in range(num_pages):
            pages.append(self.pages.take(pages[-1] if pages else None, num_pages - done))
        return pages

    def settle(self, key: BlockKey, page: int, offset: int, position: int, *, hop: bool) -> None:
        """Record that a block has arrived in a page on which a request runs. offset: the block's first row in the page.
        position: the one for which its keys are rotated now. hop: whether the keys were un-rotated on the way."""
        row = self.table.get(key)
        if row is None or (row.page is not None and row.position == position):
            return
        self.leave(row)
        row.page, row.offset, row.position = page, offset, position
        row.hops += hop
        self.table.moved()
        self.pages.add_resident(page)
        enter(self.policy, row)

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free. Returns False and evicts nothing if that many cannot be freed. The smallest
        score leaves first (CaR §III-B-3); among equals, saved blocks leave before blocks that would be lost."""
        if num_pages > self.pages.num_free + self.pages.num_cached:
            return False
        while (missing := num_pages - self.pages.num_free) > 0:
            victims = self._victims(missing)
            assert victims, "cached pages without an evictable block"
            for key in victims:
                self.evict(key)
        return True

    def _make_run(self, num_pages: int, spare: int) -> None:
        """Evict until a context finds `num_pages` adjacent free pages, and `spare` more if possible: a context whose
        pages are scattered slows every step that attends to it.

        Only blocks that no request needs and that DRAM has may be evicted. Free pages hold no history, so no more
        blocks are evicted than background eviction, which keeps a reserve of free pages, would evict after this context
        anyway. Of the blocks to leave next, only those that lie between free pages are evicted; otherwise a full pool
        would soon consist of gaps too small for a run.
        """
        pages = self.pages
        run, budget = pages.longest_run, num_pages + pages.num_pages - self._low_pages - pages.num_free
        if not (pages.prefer_contiguous and self._has_slots) or run >= num_pages + spare or budget <= 0:
            return
        sizes = [size for size in (num_pages + spare, num_pages, -(-num_pages // 2)) if size > run]
        more = max(budget, min(_RUN_CHOICE_FACTOR * budget, _MOST_CHOICE_BLOCKS))
        for most, wanted in ((budget, sizes[:2]), (min(2 * budget, more), sizes[:2]), (more, sizes)):
            rows = self._expendable(most)
            for size in wanted:
                window = pages.window_for_run((row.page for row in rows if row.page is not None), size, budget)
                if window is not None:
                    for row in rows:
                        if row.page in window:
                            self.evict(row.key)
                    return

    def _expendable(self, most: int) -> list[BlockRow]:
        """Return up to `most` blocks that may be evicted to make a run of pages, the first to leave first."""
        pinned = _Pinned(self.table, self.pages, 0, saved_only=True)
        rows = [self.table.get(key) for key in self.policy.victims(most, pinned)]
        return [row for row in rows if row is not None and row.in_dram]

    def _victims(self, count: int) -> list[BlockKey]:
        for most in self._scores.levels:
            for saved_only in (True, False) if self._has_slots else (False,):
                pinned = _Pinned(self.table, self.pages, most, saved_only)
                if victims := self.policy.victims(count, pinned):
                    return victims
        return []

    def offload(self) -> None:
        """Evict a few blocks that no request needs, if more pages are used than the high-water mark allows, and at most
        until the low-water mark is reached (CaR's background offloader, §III-C-2). Called between steps. Only saved
        blocks are evicted. They need no copy, because they were copied while they were computed."""
        pages = self.pages
        if pages.num_free >= self.least_free or not pages.num_cached:
            return
        count = min(_OFFLOAD_BLOCKS, pages.num_pages - pages.num_free - self._low_pages)
        for key in self.policy.victims(count, _Pinned(self.table, pages, 0, saved_only=True)):
            self.evict(key)
            self._stats.offloaded_blocks += 1

    def evict(self, key: BlockKey) -> None:
        """Remove a block from HBM, and from the table if no other tier has it."""
        row = self.table.get(key)
        assert row is not None
        self.leave(row)
        self._stats.evicted_blocks += 1
        if row.is_nowhere:
            self.table.forget(row)

    def leave(self, row: BlockRow) -> None:
        """Remove a block from HBM. Does not check whether another tier has it."""
        if row.page is not None:
            page, row.page = row.page, None
            self.table.moved()
            self.policy.remove(row.key)
            self.pages.drop_resident(page)

    def publish(self, row: BlockRow) -> None:
        """Enter in the table a block that was computed in a page of a running context."""
        assert row.page is not None
        known = self.table.get(row.key)
        if known is None:
            self.table.publish(row)
            self.pages.add_resident(row.page)
            enter(self.policy, row)
        elif known.page is None:
            known.kept_raw |= row.kept_raw
            known.decoded = row.decoded
            self.settle(row.key, row.page, row.offset, row.position, hop=False)


def keys_of(rows: Sequence[BlockRow], table: CacheTable) -> Iterator[BlockKey]:
    """Yield the keys of `rows` that are in the table, from tail to head. Touched in this order, a context loses its
    tail first, and the rest is a usable prefix."""
    return (row.key for row in reversed(rows) if row.key in table)
