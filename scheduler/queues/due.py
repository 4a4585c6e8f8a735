"""Implements the policy `due`, the order by work and wait: the request that is due first starts first."""

from bisect import bisect_left, insort
from collections.abc import Container
from itertools import islice
from typing import NamedTuple

from reprise.scheduler.line import Line
from reprise.scheduler.ports import CacheView
from reprise.scheduler.queues.fair_share import FairShare
from reprise.scheduler.sequence import Sequence

_REFRESH_TOKENS, _REFRESH_REQUESTS = 4096, 64  # contexts and requests that a step looks up again, at least one
_SIDE_CALL_S = 60.0  # by this over its weight, a request of weight below 1 is due later: its own work may be tiny


class _Look(NamedTuple):
    """The findings of the last look at a request."""

    number: int  # its place in the order of arrival
    due_s: float  # on the clock of arrivals
    last_start_s: float | None  # when it must start at the latest to make its target; None: it has none, or cannot


class DueQueue:
    """Orders the requests of a tenant by `due = arrival + patience * work / weight`, the least first. Between
    tenants, start-time fair queueing decides (`FairShare`).

    Work is the seconds that a request would take alone until its first token: to compute what no tier holds, and the
    part of its load that computing does not hide. So `patience` says how many seconds of waiting one second of work is
    worth. Two things change when a request is due (`due_at`):

    - A request with a target for its first token is due at arrival + target, if that is earlier. Once it cannot make
      the target any more, it is due by its work alone, plus twice the target. So it starts after requests with an equal
      target that can still make theirs, if they arrived before it became too late for this one.
    - A request of weight below 1, such as an agent's side call, is due _SIDE_CALL_S / weight later.

    No request starves: one with work W is due by arrival + patience * W / weight + 2 * target at the latest (a side
    call _SIDE_CALL_S / weight later), and none of its tenant that arrives after that starts before it. Among requests
    without targets and of equal weights, one with work w that arrives later than one with work W starts first only if
    it arrives within patience * (W - w) / weight seconds. A request that finds no room in HBM may be passed until it is
    due, and not after.

    Work changes as KV moves between tiers. Each step looks again at as many requests as a bounded effort allows, in
    turn, and at all whose target has just become out of reach.
    """

    policy = "due"

    def __init__(self, *, cache: CacheView, shares: FairShare, patience: float) -> None:
        """Set up. shares: decides between tenants. patience: how many seconds of waiting a second of work is worth, at
        least 0."""
        self._cache, self._shares, self._patience = cache, shares, patience
        self._looks: dict[Sequence, _Look] = {}  # the one looked at longest ago is first
        self._last_starts: list[tuple[float, int, Sequence]] = []  # those that can make their target, by `last_start_s`
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._looks)

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._shares.add(sequence, self._look(sequence, self._arrivals, sequence.arrived_s))

    def remove(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self._shares.remove(sequence)

    def dispatch(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self._shares.take(sequence)

    def finished(self, sequence: Sequence) -> None:
        self._shares.finished(sequence)

    def refresh(self, now: float) -> None:
        self._shares.refresh()
        left = _REFRESH_TOKENS
        for sequence in [*islice(self._looks, _REFRESH_REQUESTS)]:
            if left <= 0:
                break
            left -= len(sequence.token_ids)
            self._look_again(sequence, now)
        while self._last_starts and self._last_starts[0][0] < now:
            self._look_again(self._last_starts[0][2], now)

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        first = self._shares.first()
        if first is None or first not in skipped:
            return first
        return next((sequence for sequence in self._shares.upcoming().members if sequence not in skipped), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Return whether others may start before this request, for which HBM has no room: they may until it is due."""
        return now < self._looks[sequence].due_s

    def upcoming(self) -> Line[Sequence]:
        return self._shares.upcoming()

    def explain(self, sequence: Sequence, now: float) -> dict[str, float]:
        """Return, as `due_in_s`, the seconds until the request is due; below 0 once that time has passed."""
        return {"due_in_s": self._looks[sequence].due_s - now}

    def _look_again(self, sequence: Sequence, now: float) -> None:
        before = self._forget(sequence)
        if (due_s := self._look(sequence, before.number, now)) != before.due_s:
            self._shares.move(sequence, due_s)

    def _look(self, sequence: Sequence, number: int, now: float) -> float:
        """Find out when a request is due by where its KV is now, and return that."""
        residency = self._cache.residency(sequence.request_id)
        work_s = residency.compute_s + residency.exposed_s
        due_s, last_start_s = due_at(sequence, work_s=work_s, patience=self._patience, now=now)
        self._looks[sequence] = _Look(number, due_s, last_start_s)
        if last_start_s is not None:
            insort(self._last_starts, (last_start_s, number, sequence))
        return due_s

    def _forget(self, sequence: Sequence) -> _Look:
        look = self._looks.pop(sequence)
        if look.last_start_s is not None:
            del self._last_starts[bisect_left(self._last_starts, (look.last_start_s, look.number))]
        return look


def due_at(sequence: Sequence, *, work_s: float, patience: float, now: float) -> tuple[float, float | None]:
    """Return when a request is due, as `DueQueue` defines it, and when it must start at the latest to make its target:
    None if it has no target, or can no longer make it. All times are on the clock of `arrived_s`. work_s: seconds that
    it would take alone until its first token."""
    side_call_s = _SIDE_CALL_S if sequence.weight < 1 else 0.0
    due_s = sequence.arrived_s + (patience * work_s + side_call_s) / sequence.weight
    if sequence.target_s is None:
        return due_s, None
    target_at_s = sequence.arrived_s + sequence.target_s
    last_start_s = target_at_s - work_s
    if now <= last_start_s:
        return min(due_s, target_at_s), last_start_s
    return due_s + 2 * sequence.target_s, None
