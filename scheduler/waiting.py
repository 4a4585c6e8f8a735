"""All waiting sequences: those in the queue, and those that go before it."""

from collections import deque
from collections.abc import Container
from itertools import chain, islice

from reprise.scheduler.line import Line
from reprise.scheduler.queues.waiting_queue import WaitingQueue
from reprise.scheduler.sequence import Sequence


class Waiting:
    """Sequences that have lost their room stand before the queue, the latest of them first. One for whose sake others
    have given way is admitted before all. Single-threaded, part of the Scheduler."""

    def __init__(self, *, queue: WaitingQueue) -> None:
        self.queue = queue
        """Read only."""
        self.count = 0
        """How many wait. Read only, as all that follows but `favoured`."""
        self.resumed: deque[Sequence] = deque()  # lost their room
        self.favoured: Sequence | None = None  # others have given way to it, but there is not room enough yet
        self.seen: Line[str] = Line()
        """The line that `line` returned last."""
        self._made_of: tuple[int, tuple[Sequence, ...]] = (
            0,
            (),
        )  # the version of the queue's line, and the sequences before it

    def add(self, sequence: Sequence) -> None:
        """A request has arrived."""
        self.queue.add(sequence)
        self.count += 1

    def resume(self, sequence: Sequence) -> None:
        """It ran, and has lost its room."""
        self.resumed.appendleft(sequence)
        self.count += 1

    def next(self, skipped: Container[Sequence]) -> Sequence | None:
        """Return the sequence that starts next if those in `skipped` cannot start now. None: no other may pass them."""
        if self.favoured is not None and self.favoured not in skipped:
            return self.favoured
        return next((s for s in self.resumed if s not in skipped), None) or self.queue.best(skipped)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Whether others may start before this one while there is no room for it."""
        if sequence is self.favoured or sequence in self.resumed:
            return False
        return self.queue.may_be_passed(sequence, now)

    def start(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self.count -= 1
        if sequence is self.favoured:
            self.favoured = None
        if sequence in self.resumed:
            self.resumed.remove(sequence)
        else:
            self.queue.dispatch(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It was cancelled."""
        self.count -= 1
        if sequence is self.favoured:
            self.favoured = None
        if sequence in self.resumed:
            self.resumed.remove(sequence)
        else:
            self.queue.remove(sequence)

    def front(self) -> list[Sequence]:
        """The sequences whose order is settled, next first."""
        return [*self.resumed, *self.queue.front()]

    def once_loaded(self, count: int) -> list[Sequence]:
        """The first so many, in the order in which they would start if their loads had ended."""
        return list(islice(chain(self.resumed, self.queue.once_loaded()), count))

    def line(self, starved: Sequence | None) -> Line[str]:
        """Request ids of all, next first. starved: a sequence that goes before the queue, if any does. Answers at once
        while nothing has changed, and another version means another order."""
        queued = self.queue.upcoming()
        first = tuple(self.resumed) if starved is None else (*self.resumed, starved)
        if (made_of := (queued.version, first)) != self._made_of:
            self._made_of = made_of
            others = queued.members if starved is None else [s for s in queued.members if s is not starved]
            ids = tuple([sequence.request_id for sequence in (*first, *others)])
            if ids != self.seen.members:
                self.seen = self.seen.followed_by(ids)
        return self.seen
