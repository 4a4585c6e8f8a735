"""Predicts which session comes next where sessions take turns: rotations of agents, round-robins, evaluations that go
through the same conversations again."""

from reprise.cache.blocks.table import SessionName

_CONFIRMED_PREDICTIONS = 2  # consecutive correct predictions before the next one is believed


class Succession:
    """A predictor that expects after each session the one that followed it last time. Predicts only after recent
    predictions were correct, so that independent clients predict nothing. The Hierarchy tells it of turns and LookAhead
    asks, on the engine's thread; it is pure. Memory: one name per known session."""

    def __init__(self) -> None:
        self._after: dict[SessionName, SessionName] = {}  # session -> the one that followed it last time
        self._latest: SessionName | None = None
        self._right = 0  # consecutive correct predictions
        self.is_foretold = False  # whether `next` may return a name

    def came(self, name: SessionName) -> None:
        """Record that a turn of the session has arrived."""
        if name == self._latest:
            return  # the same session continues, which says nothing about others
        if self._latest is not None:
            self._right = self._right + 1 if self._after.get(self._latest) == name else 0
            self._after[self._latest] = name
        self._latest = name
        self.is_foretold = self._right >= _CONFIRMED_PREDICTIONS

    def forget(self, name: SessionName) -> None:
        self._after.pop(name, None)
        if name == self._latest:
            self._latest = None

    def next(self) -> SessionName | None:
        """Return the session that is expected next; None if predictions were not correct lately, or after `served`. The
        session may have been deleted."""
        if not self.is_foretold or self._latest is None:
            return None
        return self._after.get(self._latest)

    def served(self) -> None:
        """Make `next` return None until a turn of another session than the latest arrives, because nothing more has to
        be fetched for the session that `next` returned."""
        self.is_foretold = False
