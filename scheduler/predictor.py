"""Predicts how long an answer will be, from the answers of its session, its tenant and all tenants."""

import math
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate
from typing import Protocol

from reprise.scheduler.sequence import Sequence

_STEP = math.log(1.1)  # between buckets: lengths spread over orders of magnitude
_FADE = 0.98  # share of the evidence left after one more answer: about the last fifty count
_BORROWED = 2.0  # answers that what is known of a wider group counts as
_MAX_GROUPS = 10_000  # the ones not used for longest are forgotten
_LAST_BUCKET = int(math.log(1 << 24) / _STEP)


class LengthPredictor(Protocol):
    """A predictor of answer lengths in tokens. Single-threaded."""

    def predict(self, sequence: Sequence) -> int:
        """Return the predicted tokens of the whole answer: more than it has already, and at most `max_tokens`."""
        ...

    def learn(self, sequence: Sequence) -> None:
        """Learn the length of an answer that has ended by itself."""
        ...


class MaxTokensPredictor:
    """A predictor that expects every answer to reach `max_tokens`: exact where end-of-text is ignored, otherwise a
    bound."""

    def predict(self, sequence: Sequence) -> int:
        return sequence.sampling.max_tokens

    def learn(self, sequence: Sequence) -> None:
        """Do nothing: there is nothing to learn."""


class _Histogram:
    """A histogram of answer lengths with logarithmic buckets, in which older answers count exponentially less."""

    __slots__ = ("counts", "means")

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}
        self.means: dict[int, float] = {}  # length in a bucket: many answers are as long as others to the token

    def add(self, length: int) -> None:
        bucket = _bucket(length)
        for known in self.counts:
            self.counts[known] *= _FADE
        count = self.counts[bucket] = self.counts.get(bucket, 0.0) + 1.0
        before = self.means.get(bucket, length)
        self.means[bucket] = before + (length - before) / count


class QuantilePredictor:
    """A predictor that returns the `quantile` of the lengths of ended answers, among those longer than the answer is
    already.

    It weighs the answers of the session most, then those of its tenant, then those of all tenants. Before any answer
    has ended it predicts `max_tokens`. The paper CaR asks the language model itself for the length, which costs a
    prefill; this predictor costs microseconds.
    """

    def __init__(self, *, quantile: float) -> None:
        self._quantile = quantile
        self._groups: OrderedDict[tuple[str, ...], _Histogram] = OrderedDict()

    def predict(self, sequence: Sequence) -> int:
        said, most = sequence.output_tokens, sequence.sampling.max_tokens
        evidence = self._evidence(sequence, _bucket(said + 1))
        if not evidence:
            return most
        counted = [*accumulate([weight for _, weight, _ in evidence])]
        bucket, _, length = evidence[bisect_left(counted, self._quantile * counted[-1])]
        if length <= said:  # most of these had ended already: half way through what is left of the bucket
            length = (said + math.exp((bucket + 1) * _STEP)) / 2
        return min(most, max(said + 1, round(length)))

    def learn(self, sequence: Sequence) -> None:
        for group in _groups(sequence):
            histogram = self._groups.get(group)
            if histogram is None:
                histogram = self._groups[group] = _Histogram()
            histogram.add(sequence.output_tokens)
            self._groups.move_to_end(group)
        while len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)

    def _evidence(self, sequence: Sequence, least: int) -> list[tuple[int, float, float]]:
        """Return (bucket, weight, mean length in tokens) of the ended answers whose length is in bucket `least` or
        above, in ascending order. A bucket appears once for each group (session, tenant, all tenants) that has answers
        in it. weight: number of answers, less the older they are and the wider their group is."""
        evidence: list[tuple[int, float, float]] = []
        total = 0.0
        for group in reversed(_groups(sequence)):  # from all tenants to the session
            histogram = self._groups.get(group)
            if histogram is None:
                continue
            means = histogram.means
            own = [(bucket, count, means[bucket]) for bucket, count in histogram.counts.items() if bucket >= least]
            if not own:
                continue
            if total > _BORROWED:
                scale = _BORROWED / total
                evidence, total = [(bucket, weight * scale, length) for bucket, weight, length in evidence], _BORROWED
            evidence += own
            total += sum([count for _, count, _ in own])
        evidence.sort()
        return evidence


def _bucket(num_tokens: int) -> int:
    return min(_LAST_BUCKET, int(math.log(max(1, num_tokens)) / _STEP))


def _groups(sequence: Sequence) -> tuple[tuple[str, ...], ...]:
    """Return the groups of answers that a sequence's length is predicted from, narrowest first: its session, its
    tenant, all tenants."""
    return (sequence.tenant, sequence.session_id), (sequence.tenant,), ()
