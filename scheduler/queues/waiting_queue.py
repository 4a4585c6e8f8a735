"""The order in which waiting requests start: what the scheduler asks of it, and first come, first served."""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Items
from itertools import islice
from typing import Protocol

from reprise.scheduler.line import Line
from reprise.scheduler.sequence import Sequence

FRONT = 8  # where the order has no window, so many are told to the cache as the next


class WaitingQueue(Protocol):
    """Requests that have not run yet, in the order of a policy. Requests that lost their room are not in it: they stand
    before it. Single-threaded."""

    policy: str
    """Its name in the settings."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """A request has arrived. Calls come in order of arrival."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """A waiting request was cancelled. KeyError if it is not here."""
        ...

    def refresh(self) -> None:
        """Look again where the KV of the waiting requests is. Called once a step. The order changes here, in `foresee`,
        and by `add`, `remove`, `dispatch` and `finished`."""
        ...

    def foresee(self, opens_s: Items[float], loading_s: float) -> None:
        """opens_s: when each place is expected to be free, in seconds, ascending; loading_s: what is left of the loads
        under way. The order may change by it."""
        ...

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        """Return the request that starts next if those in `skipped` cannot start now. None: no other may pass them."""
        ...

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Whether another request may start in place of one that waits and finds no room. now: on the clock of
        arrivals."""
        ...

    def waited_for(self) -> Sequence | None:
        """Return the request that no later one may pass any more; None: there is none."""
        ...

    def dispatch(self, sequence: Sequence) -> None:
        """A request that `best` or `waited_for` named has started, and so left."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """A request that had started has ended, with `output_tokens` as they are now. Forgives unknown ones."""
        ...

    def front(self) -> tuple[Sequence, ...]:
        """The sequences whose order is settled, next first: they start before all others."""
        ...

    def once_loaded(self) -> tuple[Sequence, ...]:
        """The front in the order in which they would start if their loads had ended: by the place that it has here, a
        load is begun in time."""
        ...

    def near(self) -> Iterable[Sequence] | None:
        """The sequences whose KV should stay in HBM for them: CaR's window. None: the order has none."""
        ...

    def upcoming(self) -> Line[Sequence]:
        """All of them, next first: the front once it is loaded, and then the others as they would come to stand there.
        Answers at once while nothing has changed."""
        ...


class FcfsQueue:
    """First come, first served. A request that finds no room is not passed over."""

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

    def refresh(self) -> None:
        """Do nothing: the order does not depend on where KV is."""

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        return next((sequence for sequence in self._waiting if sequence not in skipped), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        return False

    def waited_for(self) -> None:
        """Return None: requests start in turn anyway."""

    dispatch = remove

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: there are no shares."""

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
