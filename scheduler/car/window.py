"""Implements the shuffled window (CaR §III-B-1): the next request is chosen among a few at the front of the queue, and
each can be passed only a bounded number of times."""

from collections.abc import Container, Mapping
from itertools import islice

from reprise.scheduler.car.classes import Standing, standing, standing_once_loaded
from reprise.scheduler.line import Line
from reprise.scheduler.ports import CacheView
from reprise.scheduler.sequence import Sequence

_REFRESH_TOKENS = 1024  # members with this many tokens, and at least one, are looked up again in a step


class ShuffledWindow:
    """A window of `size` requests, its members, at the front of a queue that is in order of arrival. No request outside
    starts before those inside, and a member that starts is replaced by the request that waits longest.

    Members start in ascending order of class (1: own KV in HBM; 2: nothing to load; 3: KV to load), then bytes to load,
    then arrival. Each member counts the later ones that started before it, for whatever reason. When it has counted
    size - 1 of them, no later one may pass it any more: the window waits for it. So at most 2 * (size - 1) others start
    between its entry and its start: those it found inside, and as many later ones.

    The paper CaR says no more than "fixed-size window at the front of the queue" and "acceptable waiting time"; the
    counting is our reading of it. It does not tell tenants apart: the paper has none.
    """

    policy = "car"

    def __init__(self, *, size: int, cache: CacheView) -> None:
        self._size = size
        self._cache = cache
        self._members: dict[Sequence, int] = {}  # how often each was passed; in order of arrival, as both dicts are
        self._outside: dict[Sequence, None] = {}
        # Standings of the members: now, and once loaded. The member that was looked up longest ago is first.
        self._standings: dict[Sequence, tuple[Standing, Standing]] = {}
        self._line: Line[Sequence] = Line()
        self._is_current = True  # the line

    def __len__(self) -> int:
        return len(self._members) + len(self._outside)

    @property
    def inside(self) -> Mapping[Sequence, int]:
        """The members in order of arrival, with how often each was passed. Read only."""
        return self._members

    def add(self, sequence: Sequence) -> None:
        self._outside[sequence] = None
        self._refill()

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._members:
            del self._members[sequence], self._standings[sequence]
        else:
            del self._outside[sequence]
        self._refill()

    def dispatch(self, sequence: Sequence) -> None:
        for member in self._members:
            if member is sequence:
                break
            self._members[member] += 1
        self.remove(sequence)

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: this policy keeps no shares of tenants."""

    def refresh(self, now: float) -> None:
        left = _REFRESH_TOKENS
        for sequence in [*self._standings]:
            if left <= 0:
                break
            left -= len(sequence.token_ids)
            before = self._standings.pop(sequence)
            self._look(sequence)
            self._is_current &= self._standings[sequence] == before

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        candidates = [sequence for sequence in self._may_start() if sequence not in skipped]
        return min(candidates, key=lambda sequence: self._standings[sequence][0], default=None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Return True. The window itself counts how often a member was passed, and `best` returns no later member once
        that was too often."""
        return True

    def upcoming(self) -> Line[Sequence]:
        """Return all waiting requests: first the members, in the order in which they would start if their loads had
        ended, then the others in order of arrival. The prefetch timer begins loads in that order, because a load that
        ends in time puts its request into the class that starts first (`TransferClass.IN_HBM`)."""
        if not self._is_current:
            first = self._may_start()
            members = [first, [*islice(self._members, len(first), None)]]
            in_order = [s for part in members for s in sorted(part, key=lambda s: self._standings[s][1])]
            self._line, self._is_current = self._line.followed_by((*in_order, *self._outside)), True
        return self._line

    def explain(self, sequence: Sequence, now: float) -> dict[str, float]:
        if sequence not in self._members:
            return {}
        return {"class": float(self._standings[sequence][0][0]), "overtaken": float(self._members[sequence])}

    def _may_start(self) -> list[Sequence]:
        """Return the members up to the first that was passed so often that no later one may pass it any more, in order
        of arrival."""
        spent = (place for place, passed in enumerate(self._members.values(), 1) if passed >= self._size - 1)
        return [*islice(self._members, next(spent, None))]

    def _look(self, sequence: Sequence) -> None:
        residency = self._cache.residency(sequence.request_id)
        self._standings[sequence] = standing(residency), standing_once_loaded(residency)

    def _refill(self) -> None:
        self._is_current = False
        for sequence in [*islice(self._outside, self._size - len(self._members))]:
            del self._outside[sequence]
            self._members[sequence] = 0
            self._look(sequence)
