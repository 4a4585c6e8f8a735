"""Records early loads, which are loads for sequences that have pages in HBM but still wait, so that their KV arrives
while others run (AttentionStore's read buffer)."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reprise.scheduler.ports import CacheView
from reprise.scheduler.sequence import Sequence

_ON_TIME_S, _ON_TIME_SHARE = 0.05, 0.25  # so far from its turn, or by such a part of itself, a load may end


@dataclass(slots=True)
class _EarlyLoad:
    started_s: float
    looked_s: float  # the time of the last look
    left_s: float  # seconds that were left of it at the last look
    had_time: bool  # it could have been started before
    turn_s: float | None = None
    finished_s: float | None = None


class EarlyLoads:
    """The waiting sequences that have an early load (they have pages in HBM, and their KV is being loaded or is there),
    in the order in which their turns come. Single-threaded, part of the Scheduler."""

    def __init__(self, *, cache: CacheView) -> None:
        self._cache = cache
        self._loads: dict[Sequence, _EarlyLoad] = {}
        self.overdue: dict[Sequence, _EarlyLoad] = {}
        """The sequences that run although their early load has not ended. Read only."""
        self.changes = 0
        """Number of times that an early load was added or removed."""
        self.judged: Callable[[str], None] | None = None
        """Is told the outcome of each load that was used; set by a policy that learns from it."""
        self.outcomes: Counter[str] = Counter()
        """Counts early loads by outcome. on_time: the load ended close to the moment when the sequence's turn came,
        within 50 ms or a quarter of the load's duration. early, late: it ended longer before or after that moment.
        at_once: it ended late, but had started as soon as it was known. wasted: the pages were needed for others, or
        the request went away."""

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._loads)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loads

    def begin(self, sequence: Sequence, now: float, had_time: bool) -> None:
        """Add a waiting sequence to which the cache has just given pages. had_time: whether an earlier step could have
        started its load."""
        self.changes += 1
        self._loads[sequence] = _EarlyLoad(now, now, self._cache.stall_s(sequence.request_id), had_time)

    def look(self, now: float) -> float:
        """Notice which early loads have ended. Return how many seconds those of the waiting sequences still take in
        sum."""
        left_s = sum([self._look(sequence, load, now) for sequence, load in self._loads.items()])
        for sequence, load in [*self.overdue.items()]:
            if not self._look(sequence, load, now):
                self._settle(self.overdue.pop(sequence))
        return left_s

    def _look(self, sequence: Sequence, load: _EarlyLoad, now: float) -> float:
        if load.finished_s is not None:
            return 0.0
        left_s = self._cache.stall_s(sequence.request_id)
        if not left_s:
            # It ended within the last step: estimate when by what was left before it.
            load.finished_s = min(now, load.looked_s + load.left_s)
        load.looked_s, load.left_s = now, left_s
        return left_s

    def start(self, sequence: Sequence, now: float) -> None:
        """Note that a sequence with an early load starts to run at `now`, which settles whether its load was early, on
        time or late."""
        self.changes += 1
        load = self._loads.pop(sequence)
        load.turn_s = now
        if self._look(sequence, load, now):
            self.overdue[sequence] = load
        else:
            self._settle(load)

    def _settle(self, load: _EarlyLoad) -> None:
        assert load.turn_s is not None
        assert load.finished_s is not None
        idle_s = load.turn_s - load.finished_s
        most_s = max(_ON_TIME_S, _ON_TIME_SHARE * (load.finished_s - load.started_s))
        if idle_s > most_s:
            outcome = "early"
        elif -idle_s > most_s:
            outcome = "late" if load.had_time else "at_once"
        else:
            outcome = "on_time"
        self.outcomes[outcome] += 1
        if self.judged is not None:
            self.judged(outcome)

    def stopped(self, sequence: Sequence) -> None:
        """Forget a sequence that has stopped running: it no longer matters when its load ends."""
        self.overdue.pop(sequence, None)

    def withdraw(self, sequence: Sequence) -> None:
        """Cancel a sequence's early load and give its pages back to the cache."""
        self._cache.withdraw(sequence.request_id)
        self.lose(sequence)

    def lose(self, sequence: Sequence) -> None:
        """Remove a sequence whose pages the cache has already taken back, for instance because its load failed."""
        self.changes += 1
        del self._loads[sequence]
        sequence.computed_tokens = 0
        self.outcomes["wasted"] += 1

    def withdraw_last(self) -> bool:
        """Cancel the early load of the sequence whose turn comes last. Return False if there is none."""
        if not self._loads:
            return False
        self.withdraw(next(reversed(self._loads)))
        return True
