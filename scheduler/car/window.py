"""Implements the shuffled window (CaR §III-B-1): the next request is chosen among a few at the front of the queue, and
each can be passed only a bounded number of times."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import islice

from reprise.scheduler.car.classes import Standing, Standings, TransferClass
from reprise.scheduler.line import Line
from reprise.scheduler.sequence import Sequence

_REFRESH_TOKENS = 1024  # members with this many tokens, and at least one, are looked up again in a step


@dataclass(slots=True)
class Member:
    """A request in the window (the next few requests of the queue), with how often it was passed."""

    entered: int  # number of its entry
    arrived: int  # number of its arrival
    overtaken: int = 0  # how often one that entered later started before it


class ShuffledWindow:
    """A window of `size` requests at the front of the queue. No request outside it starts before those inside.

    A request that starts is replaced by the one that waits longest. Inside, requests (members) start in the order of
    class, bytes to load, arrival. Each member counts the requests that entered later and started before it, for
    whatever reason. When it has counted size - 1 of them, no later one may pass it any more: the window waits for it.
    So between its entry and its start at most 2 * (size - 1) others start: those it found inside, and as many later
    ones. Tenants do not count: the paper has none.

    A member that still has KV to load stands after those without, until its KV is in HBM. Its load is started so as to
    end when its turn comes by the order that it will have then (`once_loaded`), while the others are computed.

    CaR says no more than "fixed-size window at the front of the queue" and "acceptable waiting time"; the counting is
    our reading of it.
    """

    policy = "car"

    def __init__(self, *, size: int, standings: Standings) -> None:
        self.size = size
        self.overtakes = 0
        self._standings = standings
        self._arrivals = 0
        self._entries = 0
        self._outside: dict[Sequence, int] = {}  # the others -> the number of their arrival, in that order
        self._members: dict[Sequence, Member] = {}  # kept in order of entry
        self._order: tuple[Sequence, ...] | None = None  # order of the members; None: not yet computed
        self._once_loaded: tuple[Sequence, ...] | None = None  # order of `once_loaded`; None: not yet computed
        self._line: Line[Sequence] = Line()  # the members once loaded, and then the others
        self._is_current = True  # the line

    def __len__(self) -> int:
        return len(self._members) + len(self._outside)

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._outside[sequence] = self._arrivals
        self._is_current = False
        self._refill()

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._members:
            self._leave(sequence)
            self._refill()
        else:
            del self._outside[sequence]
            self._is_current = False

    def refresh(self) -> None:
        if self._standings.refresh(_REFRESH_TOKENS):
            self._changed()

    def best(self, skipped: Container[Sequence]) -> Sequence | None:
        last_entry = self._last_entry()
        order = self.front()
        return next((s for s in order if s not in skipped and self._members[s].entered <= last_entry), None)

    def may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Return True: the window counts how often, and `best` names no other once that was too often."""
        return True

    def waited_for(self) -> Sequence | None:
        return next((s for s, m in self._members.items() if m.overtaken >= self.size - 1), None)

    def dispatch(self, sequence: Sequence) -> None:
        entered = self._members[sequence].entered
        self._leave(sequence)
        for member in self._members.values():
            if member.entered > entered:
                break
            member.overtaken += 1
            self.overtakes += 1
        self._refill()

    def finished(self, sequence: Sequence) -> None:
        """Do nothing: there are no shares."""

    def front(self) -> tuple[Sequence, ...]:
        """Return the members in the order in which they will start if nothing else happens."""
        if self._order is None:
            self._order = self._in_order(self._rank)
        return self._order

    def once_loaded(self) -> tuple[Sequence, ...]:
        """Return the members in the order in which they would start if their loads had ended: by the place that it has
        here, a load is begun in time."""
        if self._once_loaded is None:
            self._once_loaded = self._in_order(self._rank_once_loaded)
        return self._once_loaded

    def upcoming(self) -> Line[Sequence]:
        if not self._is_current:
            self._line, self._is_current = self._line.followed_by((*self.once_loaded(), *self._outside)), True
        return self._line

    @property
    def inside(self) -> Mapping[Sequence, Member]:
        """The members in order of entry. Read only."""
        return self._members

    def class_of(self, sequence: Sequence) -> TransferClass:
        """Return the class, by what it has to load, of a member of the window."""
        return self._standings[sequence][0]

    def _last_entry(self) -> int:
        """Return the highest entry number that may start now: later entries may not pass a member that was passed often
        enough."""
        spent = self.waited_for()
        return self._entries if spent is None else self._members[spent].entered

    def _rank(self, sequence: Sequence) -> tuple[Standing, int]:
        return self._standings[sequence], self._members[sequence].arrived

    def _rank_once_loaded(self, sequence: Sequence) -> tuple[Standing, int]:
        return self._standings.without_load(sequence), self._members[sequence].arrived

    def _in_order(self, rank: Callable[[Sequence], tuple[Standing, int]]) -> tuple[Sequence, ...]:
        """Return the members in the order in which they will start if sorted by `rank`: simulates starting one after
        the other, by `best` and `dispatch`."""
        left = sorted(self._members, key=rank)
        if left == [*self._members]:
            return tuple(left)  # this is the order of entry, so none is passed
        overtaken = {s: m.overtaken for s, m in self._members.items()}
        order: list[Sequence] = []
        while left:
            spent = (s for s in self._members if s in overtaken and overtaken[s] >= self.size - 1)
            first_spent = next(spent, None)
            last_entry = self._entries if first_spent is None else self._members[first_spent].entered
            chosen = next(s for s in left if self._members[s].entered <= last_entry)
            left.remove(chosen)
            del overtaken[chosen]
            order.append(chosen)
            for other in overtaken:  # has the order of entry, as `_members` has
                if self._members[other].entered > self._members[chosen].entered:
                    break
                overtaken[other] += 1
        return tuple(order)

    def _leave(self, sequence: Sequence) -> None:
        del self._members[sequence]
        self._standings.forget(sequence)
        self._changed()

    def _changed(self) -> None:
        self._order = self._once_loaded = None
        self._is_current = False

    def _refill(self) -> None:
        for sequence in [*islice(self._outside, self.size - len(self._members))]:
            self._entries += 1
            self._members[sequence] = Member(self._entries, self._outside.pop(sequence))
            self._standings.watch(sequence)
            self._changed()
