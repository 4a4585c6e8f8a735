"""Defines the queue of waiting requests that the scheduler asks for the next one, and has the simplest: first come,
first served."""

from collections.abc import Container
from itertools import islice
from typing import Protocol

from reprise.scheduler.line import Line
from reprise.scheduler.sequence import Sequence

FRONT = 8  # where the order has no window, so many are told to the cache as the next


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

    def refresh(self) -> None:
        """Look up again where the KV of waiting requests lies. Called once a step. The order changes only here and in
        `add`, `remove`, `dispatch` and `finished`."""
        ...

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        """Return the request that starts next if those in `skipped` cannot start now. None: no other may start before
        them."""
        ...

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Whether another request may start in place of one that waits and finds no room. now: on the clock of
        arrivals."""
        ...

    def dispatch(self, sequence: Sequence) -> None:
        """Remove a request that `best` returned and that has started."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """Note that a started request has ended, with its final `output_tokens`. Ignores requests that never
        started."""
        ...

    def front(self) -> tuple[Sequence, ...]:
        """Return the sequences that start before all others, next first: those in the window, or the first few if the
        policy has no window."""
        ...

    def upcoming(self) -> Line[Sequence]:
        """Return all waiting requests, in the order in which they would start if nothing else happened. Costs nothing
        while nothing has changed."""
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

    def refresh(self) -> None:
        """Do nothing: the order does not depend on where KV lies."""

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        return next((sequence for sequence in self._waiting if sequence not in skipped), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        return False

    dispatch = remove

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: this order keeps no shares of tenants."""

    def front(self) -> tuple[Sequence, ...]:
        return tuple(islice(self._waiting, FRONT))

    def upcoming(self) -> Line[Sequence]:
        if not self._is_current:
            self._line, self._is_current = self._line.followed_by(tuple(self._waiting)), True
        return self._line
