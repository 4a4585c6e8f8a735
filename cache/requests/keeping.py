"""Gathers what is known of the blocks that a cut may drop, for whoever scores them."""

from collections.abc import Callable, Sequence

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.table import CacheTable
from reprise.cache.blocks.truncate import ScoresOf
from reprise.cache.policies.keep.block_scorer import BlockScorer, CutBlocks
from reprise.cache.requests.context import RequestContext

LikenessOf = Callable[[Sequence[int]], Sequence[float]]
"""DRAM slots of full blocks -> the cosine of each one's keys and the mean key of all of them."""

_OLD_SHARE = 0.5  # of a block's attention: what was seen before counts half of what is seen now


class Keeper:
    """Single-threaded, part of the CacheManager. Changes nothing but a context's notes of attention."""

    def __init__(self, *, scorer: BlockScorer, table: CacheTable, likeness_of: LikenessOf) -> None:
        self._scorer = scorer
        self._table = table
        self._likeness_of = likeness_of

    def scores_of(self, context: RequestContext, newest: int) -> ScoresOf:
        """Return the scores of a context's blocks by where they begin. newest: where its newest message begins."""

        def scores(starts: Sequence[int]) -> Sequence[float] | None:
            tokens = context.token_ids
            blocks = [start // BLOCK_TOKENS for start in starts]
            needs = self._scorer.needs
            return self._scorer.score(
                CutBlocks(
                    tokens=[tokens[start : start + BLOCK_TOKENS] for start in starts],
                    newest=tokens[newest:],
                    attention=self._attention(context, blocks) if needs == "attention" else (),
                    likeness=self._likeness(context, blocks) if needs == "keys" else (),
                )
            )

        return scores

    @staticmethod
    def note_attention(context: RequestContext, shares: Sequence[float]) -> None:
        """Record how the end of a chunk attended to the blocks of its context. shares: a block's part of all
        attention, in order; the block that is not full may be the last."""
        for key, share in zip(context.chain(), shares, strict=False):
            context.cuts.attention[key] = attention_now(context.cuts.attention.get(key), share, len(shares))

    @staticmethod
    def _attention(context: RequestContext, blocks: Sequence[int]) -> list[float | None]:
        keys = context.keys
        return [context.cuts.attention.get(keys[block]) if block < len(keys) else None for block in blocks]

    def _likeness(self, context: RequestContext, blocks: Sequence[int]) -> list[float | None]:
        """Only slots in DRAM that hold rows have keys at hand."""
        keys = context.keys[: context.reuse.open_place]
        slots: dict[int, int] = {}
        for block in blocks:
            row = self._table.get(keys[block]) if block < len(keys) else None
            if row is not None and row.slot is not None:
                slots[block] = row.slot
        found = dict(zip(slots, self._likeness_of(list(slots.values())) if slots else (), strict=True))
        return [found.get(block) for block in blocks]


def attention_now(before: float | None, share: float, num_blocks: int) -> float:
    """Return the attention that a block has got, in units of what each of so many blocks gets if all get the same.
    before: None for a block that is seen for the first time."""
    now = share * num_blocks
    return now if before is None else _OLD_SHARE * before + (1 - _OLD_SHARE) * now
