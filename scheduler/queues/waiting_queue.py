"""Defines the queue of waiting requests that the scheduler asks for the next one, and has the simplest: first come,
first served."""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Items
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

    def refresh(self, now: float) -> None:
        """Look up again where the KV of waiting requests lies. now: on the clock of arrivals. Called once a step. The
        order changes only here and in `foresee`, `add`, `remove`, `dispatch` and `finished`."""
        ...

    def foresee(self, opens_s: Items[float], loading_s: float) -> None:
        """Take a forecast into account, which may change the order. opens_s: when each place in the batch is expected
        to be free, in seconds from now, ascending. loading_s: seconds that the current loads still take."""
        ...

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        """Return the request that starts next if those in `skipped` cannot start now. None: no other may start before
        them."""
        ...

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Whether another request may start in place of one that waits and finds no room. now: on the clock of
        arrivals."""
        ...

    def waited_for(self) -> Sequence | None:
        """Return the request that has been passed so often that no later one may pass it any more; None if there is
        none."""
        ...

    def dispatch(self, sequence: Sequence) -> None:
        """Remove a request that `best` or `waited_for` returned and that has started."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """Note that a started request has ended, with its final `output_tokens`. Ignores requests that never
        started."""
        ...

    def front(self) -> tuple[Sequence, ...]:
        """Return the sequences that start before all others, next first. They are those in the queue's window (the next
        few requests, which may be reordered), or the first few requests if the policy has no window."""
        ...

    def once_loaded(self) -> tuple[Sequence, ...]:
        """Return the sequences of `front` in the order in which they would start if their loads had ended. Loads for
        sequences that still wait are timed by this order."""
        ...

    def near(self) -> Iterable[Sequence] | None:
        """Return the sequences whose KV should stay in HBM because they start soon: CaR's window. None if the policy
        has no window."""
        ...

    def upcoming(self) -> Line[Sequence]:
        """Return all waiting requests, next first: those of `once_loaded`, in its order, and then the rest of the queue
        in the order in which it would start. Costs nothing while nothing has changed."""
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

    def foresee(self, opens_s: Items[float], loading_s: float) -> None:
        """Do nothing: the order does not depend on time."""

    def refresh(self, now: float) -> None:
        """Do nothing: the order depends neither on where KV lies nor on the time."""

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        return next((sequence for sequence in self._waiting if sequence not in skipped), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        return False

    def waited_for(self) -> None:
        """Return None: requests start in order of arrival, so no request is ever passed or has to be waited for."""

    dispatch = remove

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: this order charges tenants nothing, so nothing has to be corrected when a request ends."""

    def front(self) -> tuple[Sequence, ...]:
        return tuple(islice(self._waiting, FRONT))

    def once_loaded(self) -> tuple[Sequence, ...]:
        return self.front()

    def near(self) -> None:
        return None

    def upcoming(self) -> Line[Sequence]:
        if not self._is_current:
            self._line, self._is_current = self._line.followed_by(tuple(self._waiting)), True
        return self._line
