"""Who comes like clockwork, and so when their next turn is due: programs that poll, schedules, rotations."""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from cache.table import SessionName

_SHORTEST_GAP_S = 0.05  # what comes sooner is a parallel branch of the same turn, not a return
_OFF = 0.25  # of a gap: the next one may be so much shorter or longer and still is like it


@dataclass(slots=True)
class _Past:
    used_s: float
    gap_s: float | None = None  # the newest


class Regulars:
    """Single-threaded, pure. A session whose two newest gaps are alike is due when most of a third has passed. Memory:
    a few numbers per session that is known, and per return that is foretold until it is due."""

    def __init__(self) -> None:
        self._pasts: dict[SessionName, _Past] = {}
        self._coming: list[tuple[float, int, SessionName, float]] = []  # a heap: due, unique, who, its use before
        self._numbers = count()

    def used(self, name: SessionName, now: float) -> None:
        """A turn of the session arrived."""
        past = self._pasts.get(name)
        if past is None:
            self._pasts[name] = _Past(now)
            return
        gap_s = now - past.used_s
        if gap_s < _SHORTEST_GAP_S:
            return
        is_regular = past.gap_s is not None and abs(gap_s - past.gap_s) <= _OFF * past.gap_s
        past.used_s, past.gap_s = now, gap_s
        if is_regular:
            heappush(self._coming, (now + (1 - _OFF) * gap_s, next(self._numbers), name, now))

    def forget(self, name: SessionName) -> None:
        self._pasts.pop(name, None)

    def due(self, now: float) -> SessionName | None:
        """One whose next turn may come any moment, each once per return that is foretold; None: nobody, for now."""
        while self._coming and self._coming[0][0] <= now:
            _, _, name, used_s = heappop(self._coming)
            past = self._pasts.get(name)
            if past is None or past.used_s != used_s or past.gap_s is None:
                continue  # it has come, or is gone
            if now <= used_s + (1 + _OFF) * past.gap_s:
                return name
        return None
