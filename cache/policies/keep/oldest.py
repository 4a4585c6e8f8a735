"""Drops the oldest blocks first (AttentionStore §3.4)."""

from collections.abc import Sequence

from reprise.cache.policies.keep.block_scorer import CutBlocks, Needs


class OldestScorer:
    """A scorer that keeps the newest blocks, whatever is in them."""

    needs: Needs = "tokens"

    def score(self, blocks: CutBlocks) -> Sequence[float] | None:
        return None
