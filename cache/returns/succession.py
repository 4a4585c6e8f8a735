"""Who comes next where sessions take turns: rotations of agents, round-robins, evaluations that go through the same
conversations again."""

from cache.blocks.table import SessionName

_CONFIRMED = 2  # turns in a row that came as foretold, before the next one is believed


class Succession:
    """Single-threaded, pure. Whoever came after a session the last time is foretold to come after it again. Believed
    only where that was right just now, so that clients who know nothing of each other foretell nothing. Memory: one
    name per session that is known."""

    def __init__(self) -> None:
        self._after: dict[SessionName, SessionName] = {}  # session -> who came next, the last time
        self._latest: SessionName | None = None
        self._right = 0  # turns in a row that came as foretold
        self.is_foretold = False  # whether `next` may have a name

    def came(self, name: SessionName) -> None:
        """A turn of the session arrived."""
        if name == self._latest:
            return  # it goes on: that says nothing about the others
        if self._latest is not None:
            self._right = self._right + 1 if self._after.get(self._latest) == name else 0
            self._after[self._latest] = name
        self._latest = name
        self.is_foretold = self._right >= _CONFIRMED

    def forget(self, name: SessionName) -> None:
        self._after.pop(name, None)
        if name == self._latest:
            self._latest = None

    def next(self) -> SessionName | None:
        """Who should come next, if that is believed and it was not `served`. It may be gone."""
        if not self.is_foretold or self._latest is None:
            return None
        return self._after.get(self._latest)

    def served(self) -> None:
        """Whoever `next` names is not to be named again before somebody has come."""
        self.is_foretold = False
