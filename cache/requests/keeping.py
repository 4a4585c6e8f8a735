"""Collects what is known of the blocks that may be dropped from a full window, for the scorer."""

from collections.abc import Sequence

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import ScoresOf
from reprise.cache.policies.keep.block_scorer import BlockScorer, CutBlocks
from reprise.cache.requests.context import RequestContext

_OLD_SHARE = 0.5  # share of earlier attention in a block's mean: it counts as much as what is seen now


class Keeper:
    """A collector that gives a scorer what is known of a context's blocks, and notes how prompts attend to them. The
    ContextOpener and the Recaller ask it for scores, the Lifecycle tells it of attention, all on the engine's thread.
    It changes only a context's notes of attention."""

    def __init__(self, *, scorer: BlockScorer) -> None:
        self._scorer = scorer

    def scores_of(self, context: RequestContext, newest: int) -> ScoresOf:
        """Return a function that scores a context's blocks, given the offsets of their first tokens. newest: offset at
        which its newest message begins."""

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
        """Record how the end of a chunk attended to the blocks of its context. shares: each block's share of all
        attention, in order; the last block may not be full."""
        for key, share in zip(context.chain(), shares, strict=False):
            context.cuts.attention[key] = attention_now(context.cuts.attention.get(key), share, len(shares))

    @staticmethod
    def _attention(context: RequestContext, blocks: Sequence[int]) -> list[float | None]:
        keys = context.keys
        return [context.cuts.attention.get(keys[block]) if block < len(keys) else None for block in blocks]


def attention_now(before: float | None, share: float, num_blocks: int) -> float:
    """Return a block's attention, averaged with its earlier attention. 1 means the average share of a context's
    `num_blocks` blocks. before: the earlier result, None for a block that is seen for the first time. share: the share
    of all attention that the block got now."""
    now = share * num_blocks
    return now if before is None else _OLD_SHARE * before + (1 - _OLD_SHARE) * now
