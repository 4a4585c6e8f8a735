"""When a session comes back, guessed from its own gaps between turns and, before it has any, from everybody's."""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable

_OWN_WEIGHT = 0.3  # of the newest gap in a session's own mean
_COMMON_WEIGHT = 0.05  # of the newest gap of any session in the common mean
_SHORTEST_GAP_S = 0.01  # what comes sooner is a parallel branch of the same turn, not a return
_PATIENCE = 0.125  # gaps that a session just overdue is still given; people are not punctual


class SessionReturn:
    """The expected return of one session. Changed by `ReturnTimes` alone."""

    __slots__ = ("due", "expected_s", "log_gap", "name", "order", "used_s")

    def __init__(self, name: Hashable, order: int) -> None:
        self.name = name
        self.order = order  # of the last use among all; unique
        self.used_s: float | None = None
        self.log_gap: float | None = None
        self.expected_s = math.inf
        self.due: tuple[float, int, SessionReturn] | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Ascending: the farthest return first, then the oldest use."""
        return (-self.expected_s, self.order)


class ReturnTimes:
    """Expected return = last use + mean gap. Gaps are averaged as logarithms: they spread over orders of magnitude, and
    this mean stays near their median, unmoved by one long night. A session with a single use borrows the common gap;
    before the first gap of all, or without any use, the return is infinitely far and the oldest use ranks first.

    A session that does not come is expected as much later again as it is late already (what has been silent for long
    stays silent for long), reconsidered each time half of that has passed: it drifts to the far end for good, in
    logarithmically many steps, and never looks imminent on the way.
    """

    def __init__(self) -> None:
        self._now_s = -math.inf
        self._uses = 0
        self._common_log_gap: float | None = None
        self._due: list[tuple[float, int, SessionReturn]] = []  # (-time to reconsider, order, whom), the next one last
        self._once: dict[SessionReturn, None] = {}  # used once while no gap was known at all

    def add(self, name: Hashable) -> SessionReturn:
        self._uses += 1
        return SessionReturn(name, self._uses)

    def forget(self, session: SessionReturn) -> None:
        self._schedule(session, None)
        self._once.pop(session, None)

    def used(self, session: SessionReturn, now: float) -> list[SessionReturn]:
        """A turn of the session arrived. Returns the sessions whose rank changed, itself among them."""
        changed = self.advance(now)
        now = self._now_s
        if session.used_s is not None and (gap := now - session.used_s) >= _SHORTEST_GAP_S:
            session.log_gap = _blend(session.log_gap, math.log(gap), _OWN_WEIGHT)
            self._common_log_gap = _blend(self._common_log_gap, math.log(gap), _COMMON_WEIGHT)
        session.used_s = now
        self._uses += 1
        session.order = self._uses
        self._once[session] = None
        if self._common_log_gap is not None:  # at the first gap of all, everybody used so far gets an expectation
            for waiting in self._once:
                self._expect(waiting)
                changed.append(waiting)
            self._once.clear()
        else:
            changed.append(session)
        return changed

    def advance(self, now: float) -> list[SessionReturn]:
        """Time has passed. Returns the sessions whose rank changed because they did not come."""
        self._now_s = max(self._now_s, now)
        changed: list[SessionReturn] = []
        while self._due and -self._due[-1][0] <= self._now_s:
            session = self._due[-1][2]
            self._expect(session)
            changed.append(session)
        return changed

    def newcomer_rank(self) -> tuple[float, int]:
        """The rank of a session never heard of, if it came now."""
        gap = self._gap(None)
        return (-math.inf if gap is None else -(self._now_s + gap), self._uses + 1)

    def _gap(self, session: SessionReturn | None) -> float | None:
        log_gap = session.log_gap if session is not None and session.log_gap is not None else self._common_log_gap
        return None if log_gap is None else math.exp(log_gap)

    def _expect(self, session: SessionReturn) -> None:
        gap = self._gap(session)
        assert gap is not None
        assert session.used_s is not None
        session.expected_s = reconsider_s = session.used_s + gap
        late = self._now_s - session.expected_s
        if late >= 0:
            wait = max(late, _PATIENCE * gap)
            session.expected_s = self._now_s + wait
            reconsider_s = self._now_s + wait / 2
        # Far from zero a short wait may be lost to rounding; the clock must get past it all the same.
        self._schedule(session, max(reconsider_s, math.nextafter(self._now_s, math.inf)))

    def _schedule(self, session: SessionReturn, when_s: float | None) -> None:
        if session.due is not None:
            del self._due[bisect_left(self._due, session.due)]
        session.due = None if when_s is None else (-when_s, session.order, session)
        if session.due is not None:
            insort(self._due, session.due)


def _blend(mean: float | None, sample: float, weight: float) -> float:
    return sample if mean is None else mean + weight * (sample - mean)
