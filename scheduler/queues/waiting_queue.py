"""Defines the queue of waiting requests that the scheduler asks for the next one, and has the simplest: first come,
first served."""

from collections.abc import Container
from typing import Protocol

from reprise.scheduler.line import Line
from reprise.scheduler.sequence import Sequence


class WaitingQueue(Protocol):
    """A queue of requests that have not run yet, in the order of the policy that the settings name. Preempted requests
    are not in it: they start before it. Single-threaded."""

    policy: str
    """The name of the policy in the settings."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """Add a request that has arrived. Calls have to come in order of arrival."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting request that was cancelled. Raises KeyError if it is not in the queue."""
        ...

    def refresh(self, now: float) -> None:
        """Update the order by where the KV of waiting requests lies now. now: on the clock of `Sequence.arrived_s`.
        Called once a step. The order changes only here and in `add`, `remove`, `dispatch` and `finished`."""
        ...

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        """Return the request that starts next, leaving out those in `skipped`, which cannot start now. None if no
        request is left, or if none of the others may start before those in `skipped`."""
        ...

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Return whether others may start before this waiting request, which has found no room in HBM. now: on the
        clock of `Sequence.arrived_s`."""
        ...

    def dispatch(self, sequence: Sequence) -> None:
        """Remove a request that `best` returned and that has started."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """Note that a started request has ended, with its final `output_tokens`. Ignores requests that never
        started."""
        ...

    def upcoming(self) -> Line[Sequence]:
        """Return all waiting requests in the order in which they need their KV, next first. Costs nothing while nothing
        has changed."""
        ...

    def explain(self, sequence: Sequence, now: float) -> dict[str, float]:
        """Return the numbers that decide a waiting request's place in the queue, by name, for display. now: on the
        clock of `Sequence.arrived_s`."""
        ...


class FcfsQueue:
    """A queue that starts requests in order of arrival. While the first request finds no room in HBM, no later one
    starts."""

    policy = "fcfs"

    def __init__(self) -> None:
        self._waiting: dict[Sequence, None] = {}
        self._line: Line[Sequence] = Line()
        self._is_current = True  # the line

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self._is_current = False

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        self._is_current = False

    dispatch = remove

    def refresh(self, now: float) -> None:
        """Do nothing: the order depends neither on where KV lies nor on the time."""

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        return next((sequence for sequence in self._waiting if sequence not in skipped), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        return False

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: this order charges tenants nothing, so nothing has to be corrected when a request ends."""

    def upcoming(self) -> Line[Sequence]:
        if not self._is_current:
            self._line, self._is_current = self._line.followed_by(tuple(self._waiting)), True
        return self._line

    def explain(self, sequence: Sequence, now: float) -> dict[str, float]:
        """Return nothing: only the time of arrival decides."""
        return {}
