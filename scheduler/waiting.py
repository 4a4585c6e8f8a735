"""Keeps all waiting sequences: those in the queue, and those that start before it."""

from collections import deque
from collections.abc import Container
from itertools import chain

from reprise.scheduler.line import Line
from reprise.scheduler.queues.waiting_queue import WaitingQueue
from reprise.scheduler.sequence import Sequence


class Waiting:
    """The waiting sequences. Preempted ones start before the queue, the one preempted latest first. A starved sequence
    (its tenant has nothing running) for which others were preempted (`favoured`) starts before all. Single-threaded,
    part of the Scheduler."""

    def __init__(self, *, queue: WaitingQueue) -> None:
        self.queue = queue
        """The queue of sequences that have not run yet. Read only."""
        self.count = 0
        """Number of waiting sequences. Read only, as are all later attributes except `favoured`."""
        self.resumed: deque[Sequence] = deque()  # lost their room
        self.favoured: Sequence | None = None  # others have given way to it, but there is not room enough yet
        self.seen: Line[str] = Line()
        """The line that `line` returned last."""
        self._made_of: tuple[int, tuple[Sequence, ...]] = 0, ()  # the queue's version, and the sequences before it

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has arrived to the queue."""
        self.queue.add(sequence)
        self.count += 1

    def resume(self, sequence: Sequence) -> None:
        """Put a sequence that was running and has lost its room in HBM in front of all other waiting sequences but
        `favoured`."""
        self.resumed.appendleft(sequence)
        self.count += 1

    def next(self, skipped: Container[Sequence]) -> Sequence | None:
        """Return the sequence that starts next, leaving out those in `skipped`, which cannot start now. None if no
        sequence is left, or if none of the others may start before those in `skipped`."""
        if self.favoured is not None and self.favoured not in skipped:
            return self.favoured
        return next((s for s in self.resumed if s not in skipped), None) or self.queue.best(skipped)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Return whether others may start before this sequence while HBM has no room for it."""
        if sequence is self.favoured or sequence in self.resumed:
            return False
        return self.queue.may_be_passed(sequence, now)

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence that starts to run."""
        if not self._leave(sequence):
            self.queue.dispatch(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was cancelled."""
        if not self._leave(sequence):
            self.queue.remove(sequence)

    def _leave(self, sequence: Sequence) -> bool:
        """Count a sequence out. Return whether it was one of those that start before the queue."""
        self.count -= 1
        if sequence is self.favoured:
            self.favoured = None
        if sequence not in self.resumed:
            return False
        self.resumed.remove(sequence)
        return True

    def front(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences from the head of the line, in the order in which they would start, except that
        `favoured` is at its place in the queue."""
        return [*self.resumed, *self.queue.upcoming().members[:count]][:count]

    def last_of(self, sequences: Container[Sequence]) -> Sequence:
        """Return that waiting sequence in `sequences` which is last in line; `favoured` counts at its place in the
        queue. At least one of them has to wait."""
        in_order = chain(reversed(self.queue.upcoming().members), reversed(self.resumed))
        return next(sequence for sequence in in_order if sequence in sequences)

    def line(self, starved: Sequence | None) -> Line[str]:
        """Return the request ids of all waiting sequences, next first. starved: a sequence of a tenant that has nothing
        running; it goes before the queue. Costs little while nothing has changed; a new version means a new order."""
        queued = self.queue.upcoming()
        first = tuple(self.resumed) if starved is None else (*self.resumed, starved)
        if (made_of := (queued.version, first)) != self._made_of:
            self._made_of = made_of
            others = queued.members if starved is None else [s for s in queued.members if s is not starved]
            ids = tuple([sequence.request_id for sequence in (*first, *others)])
            if ids != self.seen.members:
                self.seen = self.seen.followed_by(ids)
        return self.seen
