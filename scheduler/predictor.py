"""How long an answer will be: learned from the answers of its session, its tenant and everybody."""

import math
from collections import OrderedDict
from typing import Protocol

from scheduler.sequence import Sequence

_STEP = math.log(1.25)  # between buckets: lengths spread over orders of magnitude, and ten percent is good enough
_FADE = 0.98  # of the evidence after one more answer: about the last fifty count
_BORROWED = 2.0  # answers that what is known of a wider group counts as
_MAX_GROUPS = 10_000  # the ones not used for longest are forgotten
_LAST_BUCKET = int(math.log(1 << 24) / _STEP)


class LengthPredictor(Protocol):
    """Single-threaded."""

    def predict(self, sequence: Sequence) -> int:
        """Tokens of the whole answer: more than it has already, and no more than `max_tokens`."""
        ...

    def learn(self, sequence: Sequence) -> None:
        """An answer has come to its own end."""
        ...


class MaxTokensPredictor:
    """Every answer is as long as it may be: true where end-of-text is ignored, a bound elsewhere."""

    def predict(self, sequence: Sequence) -> int:
        return sequence.sampling.max_tokens

    def learn(self, sequence: Sequence) -> None:
        """Nothing to learn."""


class _Histogram:
    """Answers by the logarithm of their length, the latest counting most."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}

    def add(self, bucket: int) -> None:
        for known in self.counts:
            self.counts[known] *= _FADE
        self.counts[bucket] = self.counts.get(bucket, 0.0) + 1.0


class QuantilePredictor:
    """The `quantile` of the lengths known, given that the answer is as long as it is already.

    A session speaks for itself as far as it has spoken; the rest is borrowed from its tenant, and from everybody. While
    nothing is known the answer is as long as it may be. CaR asks the language model itself ([40] there) and pays a
    prefill for it; this costs microseconds.
    """

    def __init__(self, *, quantile: float) -> None:
        self._quantile = quantile
        self._groups: OrderedDict[tuple[str, ...], _Histogram] = OrderedDict()

    def predict(self, sequence: Sequence) -> int:
        said, most = sequence.output_tokens, sequence.sampling.max_tokens
        evidence = self._evidence(sequence, _bucket(said + 1))
        if not evidence:
            return most
        target, seen = self._quantile * sum([weight for _, weight in evidence]), 0.0
        likely, _ = evidence[-1]
        for bucket, weight in evidence:
            seen += weight
            if seen >= target:
                likely = bucket
                break
        return min(most, max(said + 1, round(math.exp((likely + 0.5) * _STEP))))

    def learn(self, sequence: Sequence) -> None:
        bucket = _bucket(sequence.output_tokens)
        for group in _groups(sequence):
            histogram = self._groups.get(group)
            if histogram is None:
                histogram = self._groups[group] = _Histogram()
            histogram.add(bucket)
            self._groups.move_to_end(group)
        while len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)

    def _evidence(self, sequence: Sequence, least: int) -> list[tuple[int, float]]:
        """Buckets, and the weight of what speaks for an answer that long, among those of at least `least`; ascending, a
        bucket once for each group that has it."""
        evidence: list[tuple[int, float]] = []
        total = 0.0
        for group in reversed(_groups(sequence)):  # from everybody to the session
            histogram = self._groups.get(group)
            if histogram is None:
                continue
            own = [known for known in histogram.counts.items() if known[0] >= least]
            if not own:
                continue
            if total > _BORROWED:
                scale = _BORROWED / total
                evidence, total = [(bucket, weight * scale) for bucket, weight in evidence], _BORROWED
            evidence += own
            total += sum([count for _, count in own])
        evidence.sort()
        return evidence


def _bucket(num_tokens: int) -> int:
    return min(_LAST_BUCKET, int(math.log(max(1, num_tokens)) / _STEP))


def _groups(sequence: Sequence) -> tuple[tuple[str, ...], ...]:
    """The session, its tenant, everybody."""
    return (sequence.tenant, sequence.session_id), (sequence.tenant,), ()
