"""Those who wait with their pages already given: their KV comes while others run (AttentionStore's read buffer, started
by CaR's prefetch timer)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.ports import CacheView
from scheduler.sequence import Sequence

_EARLY_S = 0.05  # idle for less than that is on time, however short the load


@dataclass(slots=True)
class _Ahead:
    started_s: float
    finished_s: float | None = None


class AheadLoads:
    """Single-threaded, part of the Scheduler. In the order in which they start."""

    def __init__(self, *, cache: CacheView) -> None:
        self._cache = cache
        self._loads: dict[Sequence, _Ahead] = {}
        self.outcomes: Counter[str] = Counter()
        """early: its pages lay idle for longer than the load had taken; on_time; late: the turn came first; wasted: the
        pages were needed for others, or the request went away."""

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._loads)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loads

    def begin(self, sequence: Sequence, now: float) -> None:
        """The cache has admitted it."""
        self._loads[sequence] = _Ahead(now)

    def look(self, now: float) -> float:
        """Notice what has arrived; seconds of loading that are left."""
        left_s = 0.0
        for sequence, load in self._loads.items():
            stall_s = self._cache.stall_s(sequence.request_id)
            left_s += stall_s
            if not stall_s and load.finished_s is None:
                load.finished_s = now
        return left_s

    def start(self, sequence: Sequence, now: float) -> None:
        """Its turn has come."""
        load = self._loads.pop(sequence)
        if load.finished_s is None and self._cache.stall_s(sequence.request_id):
            self.outcomes["late"] += 1
            return
        finished_s = now if load.finished_s is None else load.finished_s
        idle_s = now - finished_s
        self.outcomes["early" if idle_s > max(_EARLY_S, finished_s - load.started_s) else "on_time"] += 1

    def withdraw(self, sequence: Sequence) -> None:
        """Its pages are given back."""
        self._cache.withdraw(sequence.request_id)
        self.lose(sequence)

    def lose(self, sequence: Sequence) -> None:
        """The cache has taken its pages: its load has failed."""
        del self._loads[sequence]
        sequence.computed_tokens = 0
        self.outcomes["wasted"] += 1

    def withdraw_last(self) -> bool:
        """Give back the pages of the one whose turn comes last. False if there is none."""
        if not self._loads:
            return False
        self.withdraw(next(reversed(self._loads)))
        return True
