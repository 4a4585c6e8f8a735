"""Recalls blocks that a truncation dropped, if a new message is about them. It does arithmetic on tokens alone, as the
truncation does."""

from bisect import bisect_right
from collections.abc import Sequence

from reprise.cache.blocks.context import MAX_DROPPED
from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.table import CacheTable
from reprise.cache.blocks.truncate import (
    Range,
    apply_cuts,
    blocks_of,
    map_offset,
    may_leave,
    merge_cuts,
    subtract,
    unmap_offset,
)
from reprise.cache.policies.keep.recall import choose
from reprise.cache.requests.context import RequestContext
from reprise.cache.requests.keeping import Keeper

_WINDOW_DIVISOR = 4  # one in so many tokens of the window may be recalled for a message


class Recaller:
    """A part that brings dropped blocks back into a context that has no pages, in exchange for as many of its blocks.
    The ContextOpener calls it, on the engine's thread.

    Recalled blocks keep their keys, like blocks that a cut kept: they were computed after other blocks than those
    before them now. Blocks of the conversation are counted from its beginning, with nothing cut.
    """

    def __init__(self, *, table: CacheTable, keeper: Keeper, window: int) -> None:
        self._table = table
        self._keeper = keeper
        self._most = most_recalled(window)

    def note_dropped(self, context: RequestContext, cuts: Sequence[Range]) -> None:
        """Remember the computed blocks that a truncation is about to drop. cuts: ranges of the context."""
        computed = context.keys[: context.reuse.open_place]
        for start in blocks_of(cuts):
            place = unmap_offset(start, context.cuts.ranges) // BLOCK_TOKENS
            context.cuts.recalled.discard(place)
            if start // BLOCK_TOKENS < len(computed):
                context.cuts.dropped[place] = computed[start // BLOCK_TOKENS]
        for block in sorted(context.cuts.dropped)[: max(0, len(context.cuts.dropped) - MAX_DROPPED)]:
            del context.cuts.dropped[block]

    def recall(self, context: RequestContext, newest: int) -> None:
        """Recall the dropped blocks that the newest message is about, if there are any. newest: offset in the
        conversation at which that message begins."""
        candidates = self._candidates(context)
        if not candidates:
            return
        stream, computed = context.cuts.stream, context.reuse.open_place * BLOCK_TOKENS
        kept = [context.token_ids[start : start + BLOCK_TOKENS] for start in range(0, computed, BLOCK_TOKENS)]
        dropped = [(b, stream[b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]) for b in candidates]
        places, spared = choose(dropped, kept, stream[newest:], self._most)
        victims = self._victims(context, newest, spared) if places else []
        count = min(len(places), len(victims))
        if count:
            self._exchange(context, places[:count], victims[:count])

    def unreadable(self, context: RequestContext) -> list[Range]:
        """Return those recalled ranges of a context that cannot be used: they are not stored any more, or could not be
        read."""
        lost = []
        for block in sorted(context.cuts.recalled):
            start = map_offset(block * BLOCK_TOKENS, context.cuts.ranges)
            place = start // BLOCK_TOKENS
            if place >= context.reuse.open_place:
                continue
            row = self._table.get(context.keys[place])
            if row is None or row.is_nowhere or row.key in context.reuse.unread:
                lost.append((start, start + BLOCK_TOKENS))
        return merge_cuts([], lost)

    def _candidates(self, context: RequestContext) -> list[int]:
        """Return the numbers of the dropped blocks that could be brought back, ascending: those that are stored and
        whose place is before the first row that has to be computed. Blocks that the client dropped itself are left
        out."""
        own = subtract(context.cuts.ranges, context.cuts.by_client)
        ends = [end for _, end in own]
        known = unmap_offset(context.reuse.open_place * BLOCK_TOKENS, context.cuts.ranges)
        found = []
        for block, key in sorted(context.cuts.dropped.items()):
            start = block * BLOCK_TOKENS
            place = bisect_right(ends, start)
            row = self._table.get(key)
            if row is None or not row.is_saved or start >= known or place == len(own) or start < own[place][0]:
                continue
            if row.token_ids.tolist() == context.cuts.stream[start : start + BLOCK_TOKENS]:
                found.append(block)
        return found

    def _victims(self, context: RequestContext, newest: int, spared: Sequence[bool]) -> list[int]:
        """Return the blocks that may leave the context for recalled ones, by their index in it: first those that were
        recalled for earlier messages, then the least wanted."""
        rules, cuts = context.cuts.rules, context.cuts.ranges
        marked = [(map_offset(a, cuts), map_offset(b, cuts)) for a, b in rules.important]
        newest = map_offset(newest, cuts)
        limit = min(newest, context.reuse.open_place * BLOCK_TOKENS)
        starts = list(blocks_of(may_leave(map_offset(rules.keep_first, cuts), limit, marked)))
        scores = self._keeper.scores_of(context, newest)(starts) or range(len(starts))
        recalled = {map_offset(block * BLOCK_TOKENS, cuts) for block in context.cuts.recalled}
        order = sorted(zip(starts, scores, strict=True), key=lambda pair: (pair[0] not in recalled, pair[1], pair[0]))
        return [start // BLOCK_TOKENS for start, _ in order if not spared[start // BLOCK_TOKENS]]

    @staticmethod
    def _exchange(context: RequestContext, places: Sequence[int], victims: Sequence[int]) -> None:
        """Replace blocks of the context (`victims`, by their index in it) by dropped ones (`places`, by their index in
        the conversation)."""
        blocks: dict[int, BlockKey] = {}
        for place, key in enumerate(context.keys[: context.reuse.open_place]):
            blocks[unmap_offset(place * BLOCK_TOKENS, context.cuts.ranges) // BLOCK_TOKENS] = key
        before = list(blocks)
        leaving = {before[place]: blocks.pop(before[place]) for place in victims}
        blocks.update((place, context.cuts.dropped.pop(place)) for place in places)
        context.cuts.dropped.update(leaving)
        context.cuts.recalled = (context.cuts.recalled - leaving.keys()) | set(places)
        context.cuts.recalled_tokens = len(places) * BLOCK_TOKENS
        after = sorted(blocks)
        same = next(n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        context.lineage = context.lineage.rejoined([blocks[block] for block in after], same, context.reuse.open_hint)
        ranges = [(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in leaving]
        back = [(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in places]
        context.cuts.ranges = subtract(merge_cuts([], [*context.cuts.ranges, *ranges]), back)
        context.token_ids[:] = apply_cuts(context.cuts.stream, context.cuts.ranges)
        context.cuts.is_new, context.reuse.remembered = True, None


def most_recalled(window: int) -> int:
    """Return the most blocks that may be recalled for one message, in a window of `window` tokens."""
    return max(1, window // (_WINDOW_DIVISOR * BLOCK_TOKENS))
