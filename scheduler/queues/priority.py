"""Sorts requests into CaR's three classes by the bytes they have to load (CaR §III-B-1), and has the queue that starts
them in the order of these classes."""

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Items
from enum import IntEnum
from typing import NamedTuple

from reprise.scheduler.line import Line
from reprise.scheduler.ports import CacheView, Residency
from reprise.scheduler.queues.waiting_queue import FRONT
from reprise.scheduler.sequence import Sequence

_REFRESH_TOKENS = 4096  # contexts looked up per step: a tenth of a millisecond, however long histories are


class TransferClass(IntEnum):
    """A request's class by what it has to load. The smaller class starts first."""

    IN_HBM = 1  # some of the session's own KV is in HBM and none is to come, even if a part has to be computed
    NOTHING_TO_LOAD = 2  # no history, all of it lost, or cheaper to recompute; a shared system prompt is no history
    LOADS = 3  # KV has to come from below; once all of it is in HBM, the request is in class 1


Standing = tuple[TransferClass, int]
"""A request's rank: (class, bytes to load), ascending; the order of arrival decides between equals."""


def standing(residency: Residency) -> Standing:
    """Return the request's sort key (its TransferClass, bytes to load) by the rule of the paper CaR: a load counts
    until it has ended, even if computation would hide it."""
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
    load_s: float | None


class Standings:
    """A table of the sort keys (TransferClass, bytes to load) of waiting requests, called standings. Each step looks up
    only some requests in the cache again, in rotation: as many as together have a bounded number of context tokens."""

    def __init__(self, *, cache: CacheView, standing: Callable[[Residency], Standing]) -> None:
        self._cache = cache
        self._standing = standing
        self._known: dict[Sequence, _Known] = {}  # the one looked at longest ago is first

    def __getitem__(self, sequence: Sequence) -> Standing:
        return self._known[sequence].now

    def without_load(self, sequence: Sequence) -> Standing:
        """Return the sort key (TransferClass, bytes to load) that the request will have once its load has ended."""
        return self._known[sequence].without_load

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._known

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._known)

    def load_s(self, sequence: Sequence) -> float | None:
        """Return the seconds that the request's load would take alone; None if it needs no load or the load has
        begun."""
        return self._known[sequence].load_s

    def watch(self, sequence: Sequence) -> None:
        residency = self._cache.residency(sequence.request_id)
        load_s = residency.load_s if residency.bytes_to_load and not residency.is_loading else None
        self._known[sequence] = _Known(self._standing(residency), without_load(residency), load_s)

    def forget(self, sequence: Sequence) -> None:
        del self._known[sequence]

    def refresh(self, num_tokens: int = _REFRESH_TOKENS) -> list[tuple[Sequence, Standing]]:
        """Look up in the cache again the requests that were looked up longest ago: at least one request, and more until
        they have `num_tokens` tokens of context together. Return the requests whose sort key (TransferClass, bytes to
        load) has changed, each with its earlier sort key."""
        changed = []
        left = num_tokens
        for sequence in list(self._known):
            if left <= 0:
                break
            left -= len(sequence.token_ids)
            before = self._known.pop(sequence).now
            self.watch(sequence)
            if self[sequence] != before:
                changed.append((sequence, before))
        return changed


class PriorityQueue:
    """A queue ordered by TransferClass, bytes to load and arrival, the baseline with which the window of the paper CaR
    is compared. A request that has KV to load may wait for ever, while others come that have less to load or none.
    While the first request finds no room in HBM, no later request starts."""

    policy = "priority"

    def __init__(self, *, standings: Standings) -> None:
        self._standings = standings
        self._arrivals = 0
        self._numbers: dict[Sequence, int] = {}
        self._order: list[tuple[Standing, int, Sequence]] = []  # numbers are unique, so sequences are not compared
        self._line: Line[Sequence] = Line()
        self._is_current = True  # the line

    def __len__(self) -> int:
        return len(self._order)

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._numbers[sequence] = self._arrivals
        self._standings.watch(sequence)
        self._put_in(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._take_out(sequence, self._standings[sequence])
        del self._numbers[sequence]
        self._standings.forget(sequence)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        return False

    def waited_for(self) -> None:
        """Return None: this order sets no bound on how often a request is passed, so no request is ever waited for."""

    dispatch = remove

    def foresee(self, opens_s: Items[float], loading_s: float) -> None:
        """Ignore the forecast of free places: this order depends only on where KV is now."""

    def refresh(self, now: float) -> None:
        for sequence, before in self._standings.refresh():
            self._take_out(sequence, before)
            self._put_in(sequence)

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        return next((sequence for _, _, sequence in self._order if sequence not in skipped), None)

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: this order charges tenants nothing, so nothing has to be corrected when a request ends."""

    def front(self) -> tuple[Sequence, ...]:
        return tuple([sequence for _, _, sequence in self._order[:FRONT]])

    def once_loaded(self) -> tuple[Sequence, ...]:
        return self.front()

    def near(self) -> None:
        return None

    def upcoming(self) -> Line[Sequence]:
        if not self._is_current:
            order = tuple([sequence for _, _, sequence in self._order])
            self._line, self._is_current = self._line.followed_by(order), True
        return self._line

    def _put_in(self, sequence: Sequence) -> None:
        insort(self._order, (self._standings[sequence], self._numbers[sequence], sequence))
        self._is_current = False

    def _take_out(self, sequence: Sequence, where: Standing) -> None:
        del self._order[bisect_left(self._order, (where, self._numbers[sequence]))]
        self._is_current = False
