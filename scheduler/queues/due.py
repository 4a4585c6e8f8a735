"""Implements the policy `due`, the order by work and wait: the request that is due first starts first."""

from collections.abc import Container
from itertools import islice

from reprise.scheduler.line import Line
from reprise.scheduler.ports import CacheView
from reprise.scheduler.queues.fair_share import FairShare
from reprise.scheduler.sequence import Sequence

_REFRESH_TOKENS, _REFRESH_REQUESTS = 4096, 64  # contexts and requests that a step looks up again, at least one


class DueQueue:
    """Orders the requests of a tenant by `due = arrival + patience * work / weight`, the least first. Tenants share by
    start-time fair queueing (`FairShare`).

    Work is the seconds that a request would take alone until its first token: to compute what no tier holds, and the
    part of its load that computing does not hide. So `patience` says how many seconds of waiting one second of work is
    worth. None starves: of a tenant's requests with equal weights, none that comes more than patience * (W - w) later
    starts before another, W and w being their works. A request that finds no room in HBM may be passed until it is due,
    and not after.

    Work changes as KV moves between tiers. Each step looks again at as many requests as a bounded effort allows, in
    turn.
    """

    policy = "due"

    def __init__(self, *, cache: CacheView, shares: FairShare, patience: float) -> None:
        """patience: seconds of waiting for a second of work, at least 0."""
        self._cache, self._shares, self._patience = cache, shares, patience
        self._due_s: dict[Sequence, float] = {}  # on the clock of arrivals; the one looked at longest ago is first

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, sequence: Sequence) -> None:
        self._due_s[sequence] = due_s = self._look(sequence)
        self._shares.add(sequence, due_s)

    def remove(self, sequence: Sequence) -> None:
        del self._due_s[sequence]
        self._shares.remove(sequence)

    def dispatch(self, sequence: Sequence) -> None:
        del self._due_s[sequence]
        self._shares.take(sequence)

    def finished(self, sequence: Sequence) -> None:
        self._shares.finished(sequence)

    def refresh(self) -> None:
        self._shares.refresh()
        left = _REFRESH_TOKENS
        for sequence in [*islice(self._due_s, _REFRESH_REQUESTS)]:
            if left <= 0:
                break
            left -= len(sequence.token_ids)
            before, due_s = self._due_s.pop(sequence), self._look(sequence)
            self._due_s[sequence] = due_s
            if due_s != before:
                self._shares.move(sequence, due_s)

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        first = self._shares.first()
        if first is None or first not in skipped:
            return first
        return next((sequence for sequence in self._shares.upcoming().members if sequence not in skipped), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Return whether the request is not due yet."""
        return now < self._due_s[sequence]

    def upcoming(self) -> Line[Sequence]:
        return self._shares.upcoming()

    def explain(self, sequence: Sequence, now: float) -> dict[str, float]:
        """Return in how many seconds the request is due; below 0, if it has been due."""
        return {"due_in_s": self._due_s[sequence] - now}

    def _look(self, sequence: Sequence) -> float:
        """Return when a request is due by where its KV is now."""
        residency = self._cache.residency(sequence.request_id)
        work_s = residency.compute_s + residency.exposed_s
        return sequence.arrived_s + self._patience * work_s / sequence.weight
