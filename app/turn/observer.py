"""What happens in a turn, told to those who count, show or trace it. The turn itself knows none of them."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from app.errors import ApiError
from app.turn.answer import Answer
from engine.messages import ModelInfo, TokensBySource

log = logging.getLogger(__name__)


class ObservedTurn(Protocol):
    """What an observer may read of a `Generation`."""

    @property
    def request_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def arrived_s(self) -> float: ...  # monotonic clock
    @property
    def choices(self) -> Sequence[Answer]: ...
    @property
    def report(self) -> TokensBySource | None: ...


class TurnObserver:
    """Override what is of interest. Called on the event loop between two tokens, so a method must return at once."""

    def first_token(self, turn: ObservedTurn, answer: Answer) -> None:
        """The first tokens of one answer have come; its report says where the KV of the prompt came from."""

    def gap(self, turn: ObservedTurn, seconds: float) -> None:
        """Later tokens have come, so long after the ones before them, per token."""

    def ended(self, turn: ObservedTurn, answer: Answer) -> None:
        """One answer is complete. Not called when an error ends it or its client leaves."""

    def failed(self, turn: ObservedTurn, error: ApiError) -> None:
        """The engine refused the turn or lost it, maybe in the middle of a stream."""

    def closed(self, turn: ObservedTurn) -> None:
        """The turn is over, however it ended. Called once per turn, in the task of its request."""


class Observers(TurnObserver):
    """Several observers as one. An observer that raises is logged and harms neither the turn nor the others."""

    def __init__(self, observers: Sequence[TurnObserver]) -> None:
        self._observers = observers

    def first_token(self, turn: ObservedTurn, answer: Answer) -> None:
        self._tell(lambda observer: observer.first_token(turn, answer))

    def gap(self, turn: ObservedTurn, seconds: float) -> None:
        self._tell(lambda observer: observer.gap(turn, seconds))

    def ended(self, turn: ObservedTurn, answer: Answer) -> None:
        self._tell(lambda observer: observer.ended(turn, answer))

    def failed(self, turn: ObservedTurn, error: ApiError) -> None:
        self._tell(lambda observer: observer.failed(turn, error))

    def closed(self, turn: ObservedTurn) -> None:
        self._tell(lambda observer: observer.closed(turn))

    def _tell(self, call: Callable[[TurnObserver], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                log.exception("%s failed to note a turn", type(observer).__name__)
