"""Sorts requests into CaR's three classes by the bytes they have to load (CaR §III-B-1)."""

from enum import IntEnum
from typing import NamedTuple

from reprise.scheduler.ports import CacheView, Residency
from reprise.scheduler.sequence import Sequence


class TransferClass(IntEnum):
    """A request's class by what it has to load. The smaller class starts first."""

    IN_HBM = 1  # some of the session's own KV is in HBM and none is to come, even if a part has to be computed
    NOTHING_TO_LOAD = 2  # no history, all of it lost, or cheaper to recompute; a shared system prompt is no history
    LOADS = 3  # KV has to come from below; once all of it is in HBM, the request is in class 1


Standing = tuple[TransferClass, int]
"""A request's rank: (class, bytes to load), ascending; the order of arrival decides between equals."""


def standing(residency: Residency) -> Standing:
    """Return the request's standing (class, bytes to load) by the paper's rule: a load counts until it has ended, even
    if computation would hide it."""
    if residency.bytes_to_load:
        return TransferClass.LOADS, residency.bytes_to_load
    return without_load(residency)


def without_load(residency: Residency) -> Standing:
    """Return the standing (class, bytes to load) of a request as if it had nothing to load."""
    # Tokens that it has in common with others do not count: a flood that shares nothing but its first words would be
    # shuffled.
    return (TransferClass.IN_HBM if residency.own_tokens else TransferClass.NOTHING_TO_LOAD), 0


class _Known(NamedTuple):
    now: Standing
    without_load: Standing


class Standings:
    """A table of the standings, (class, bytes to load), by which the requests in CaR's window are ordered. The requests
    take turns in being looked up again in the cache, since each step has time for a bounded number of tokens."""

    def __init__(self, *, cache: CacheView) -> None:
        self._cache = cache
        self._known: dict[Sequence, _Known] = {}  # the one looked at longest ago is first

    def __getitem__(self, sequence: Sequence) -> Standing:
        return self._known[sequence].now

    def without_load(self, sequence: Sequence) -> Standing:
        """Return the standing that the request will have once its load has ended."""
        return self._known[sequence].without_load

    def watch(self, sequence: Sequence) -> None:
        residency = self._cache.residency(sequence.request_id)
        self._known[sequence] = _Known(standing(residency), without_load(residency))

    def forget(self, sequence: Sequence) -> None:
        del self._known[sequence]

    def refresh(self, num_tokens: int) -> bool:
        """Look up again in the cache the requests that were looked up longest ago, until `num_tokens` tokens of context
        are reached; at least one. Return whether a standing has changed."""
        has_changed = False
        left = num_tokens
        for sequence in list(self._known):
            if left <= 0:
                break
            left -= len(sequence.token_ids)
            before = self._known.pop(sequence)
            self.watch(sequence)
            has_changed |= self._known[sequence] != before
        return has_changed
