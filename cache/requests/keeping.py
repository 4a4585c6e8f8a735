"""Gathers what is known of the blocks that a cut may drop, for whoever scores them."""

from collections.abc import Sequence

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import ScoresOf
from reprise.cache.policies.keep.block_scorer import BlockScorer, CutBlocks
from reprise.cache.requests.context import RequestContext

_OLD_SHARE = 0.5  # of a block's attention: what was seen before counts half of what is seen now


class Keeper:
    """Single-threaded, part of the CacheManager. Changes nothing but a context's notes of attention."""

    def __init__(self, *, scorer: BlockScorer) -> None:
        self._scorer = scorer

    def scores_of(self, context: RequestContext, newest: int) -> ScoresOf:
        """Return the scores of a context's blocks by where they begin. newest: where its newest message begins."""

        def scores(starts: Sequence[int]) -> Sequence[float] | None:
            tokens = context.token_ids
            blocks = [start // BLOCK_TOKENS for start in starts]
            return self._scorer.score(
                CutBlocks(
                    tokens=[tokens[start : start + BLOCK_TOKENS] for start in starts],
                    newest=tokens[newest:],
                    attention=self._attention(context, blocks) if self._scorer.needs == "attention" else (),
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


def attention_now(before: float | None, share: float, num_blocks: int) -> float:
    """Return the attention that a block has got, in units of what each of so many blocks gets if all get the same.
    before: None for a block that is seen for the first time."""
    now = share * num_blocks
    return now if before is None else _OLD_SHARE * before + (1 - _OLD_SHARE) * now
