"""Keeps the blocks to which later text attended most (H2O, arXiv 2306.14048; SnapKV, arXiv 2404.14469)."""

from collections.abc import Sequence

from reprise.cache.policies.keep.block_scorer import CutBlocks, Needs, with_guesses


class AttendedScorer:
    """A scorer that drops the blocks to which the ends of later prompts attended least. Differs from both papers in
    that it counts blocks, not tokens, for all heads and layers together, and that nothing is dropped before the window
    is full."""

    needs: Needs = "attention"

    def score(self, blocks: CutBlocks) -> Sequence[float] | None:
        return with_guesses(blocks.attention)
