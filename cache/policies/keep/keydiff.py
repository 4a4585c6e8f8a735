"""Keeps what differs (KeyDiff, arXiv 2504.15364)."""

from collections.abc import Sequence

from reprise.cache.policies.keep.block_scorer import CutBlocks, Needs, with_guesses


class KeyDiffScorer:
    """Drops the blocks whose keys are most like the mean key: what they hold is said elsewhere too. Needs no
    attention. Differs from the paper in that it counts blocks, not tokens."""

    needs: Needs = "keys"

    def score(self, blocks: CutBlocks) -> Sequence[float] | None:
        known = with_guesses(blocks.likeness)
        return None if known is None else [-likeness for likeness in known]
