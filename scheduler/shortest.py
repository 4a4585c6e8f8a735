"""Whose prompt is computed next, of those who run: the one with the fewest tokens left, within a bound."""

from collections.abc import Sequence as Items

from scheduler.sequence import Sequence


class ShortestFirst:
    """A prompt may be passed, step after step, by prompts that started later, but by no more of their tokens together
    than it had to compute itself: nobody waits twice as long because others have less to do. Pure, single-threaded."""

    def __init__(self) -> None:
        self._may_pass: dict[Sequence, int] = {}  # how many tokens still; in order of start
        self._spare: dict[Sequence, int] = {}  # of these, in this step, what those planned for it leave to newcomers
        self._planned: set[Sequence] = set()  # to have a chunk in this step; the others have come since
        self._had: set[Sequence] = set()  # their chunk in this step

    def started(self, sequence: Sequence) -> None:
        """It runs, and its prompt is to be computed."""
        self._may_pass[sequence] = self._spare[sequence] = sequence.pending_tokens

    def begin_step(self, prefills: Items[Sequence]) -> list[Sequence]:
        """These have prompts to compute. Next first."""
        self._had.clear()
        self._may_pass = {s: tokens for s, tokens in self._may_pass.items() if s in prefills}
        may_pass, left = dict(self._may_pass), [s for s in prefills if s in self._may_pass]
        left.sort(key=[*may_pass].index)
        ordered = [s for s in prefills if s not in self._may_pass]
        while left:
            chosen = left[0]
            for place, sequence in enumerate(left):
                pending = sequence.pending_tokens
                if pending < chosen.pending_tokens and all(pending <= may_pass[s] for s in left[:place]):
                    chosen = sequence
            for passed in left[: left.index(chosen)]:
                may_pass[passed] -= chosen.pending_tokens
            left.remove(chosen)
            ordered.append(chosen)
        self._planned, self._spare = set(ordered), may_pass
        return ordered

    def may_start(self, pending: int) -> bool:
        """Whether a newcomer with so many tokens goes ahead of all who have had no chunk yet in this step."""
        passed = [s for s in self._may_pass if s not in self._had]
        return all(pending < s.pending_tokens and pending <= self._spare[s] for s in passed)

    def computes(self, sequence: Sequence, num_tokens: int) -> None:
        """It has a chunk in this step, ahead of those who have had none yet."""
        self._had.add(sequence)
        for other in self._may_pass:
            if other is sequence:
                return
            if other not in self._had:
                self._may_pass[other] -= num_tokens
                if sequence not in self._planned:
                    self._spare[other] -= num_tokens
