"""Predicts the next turn of sessions that return at regular intervals: polling programs, schedules, rotations."""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from reprise.cache.blocks.table import SessionName
from reprise.cache.returns.return_times import PUNCTUAL

# What comes sooner counts as part of the turn before it. It may be a parallel branch, which is no return. A session
# that returns so soon has left no tier, and no fetch would end in time. `ReturnTimes` learns from shorter gaps too:
# a program that asks fifty times a second does return.
_SHORTEST_GAP_S = 0.05


@dataclass(slots=True)
class _Past:
    used_s: float
    gap_s: float | None = None  # the newest gap


class _Coming(NamedTuple):
    """A predicted return of a session."""

    due_s: float
    number: int  # unique
    name: SessionName
    used_s: float  # time of the use that the prediction is based on
    until_s: float


class Regulars:
    """A predictor for sessions whose two newest gaps (times between two turns) are alike: such a session is due shortly
    before a third gap like them has passed. The Hierarchy tells it of turns and LookAhead asks, on the engine's thread;
    it is pure. Memory: a few numbers per known session, and per predicted return until it is due."""

    def __init__(self) -> None:
        self._pasts: dict[SessionName, _Past] = {}
        self._coming: list[_Coming] = []  # a heap
        self._numbers = count()

    def used(self, name: SessionName, now: float) -> None:
        """Record that a turn of the session has arrived."""
        past = self._pasts.get(name)
        if past is None:
            self._pasts[name] = _Past(now)
            return
        gap_s = now - past.used_s
        if gap_s < _SHORTEST_GAP_S:
            return
        is_regular = past.gap_s is not None and abs(gap_s - past.gap_s) <= PUNCTUAL * past.gap_s
        past.used_s, past.gap_s = now, gap_s
        if is_regular:
            due_s, until_s = now + (1 - PUNCTUAL) * gap_s, now + (1 + PUNCTUAL) * gap_s
            heappush(self._coming, _Coming(due_s, next(self._numbers), name, now, until_s))

    def forget(self, name: SessionName) -> None:
        self._pasts.pop(name, None)

    def due(self, now: float) -> SessionName | None:
        """Return the session whose turn is predicted first, of those that are due at `now` and were not marked by
        `served`; None if there is none."""
        while self._coming and self._coming[0].due_s <= now:
            coming = self._coming[0]
            past = self._pasts.get(coming.name)
            if past is not None and past.used_s == coming.used_s and now <= coming.until_s:
                return coming.name
            heappop(self._coming)
        return None

    def served(self) -> None:
        """Stop `due` from returning again the session that it returned last, until that session has had its next
        turn."""
        heappop(self._coming)
