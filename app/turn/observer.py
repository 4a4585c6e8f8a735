"""Tells observers what happens in a turn, so that they can count, show or trace it. The turn knows none of them."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from reprise.app.errors import ApiError
from reprise.app.turn.answer import Answer
from reprise.engine.messages import ModelInfo, TokensBySource

log = logging.getLogger(__name__)


class ObservedTurn(Protocol):
    """The part of a `Generation` that observers may read."""

    @property
    def request_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def token_ids(self) -> Sequence[int]: ...  # the tokens of the prompt
    @property
    def arrived_s(self) -> float: ...  # monotonic clock
    @property
    def ttft_target_ms(self) -> float | None: ...
    @property
    def made_target(self) -> bool | None: ...
    @property
    def choices(self) -> Sequence[Answer]: ...
    @property
    def report(self) -> TokensBySource | None: ...


class TurnObserver:
    """A base class of observers: override the methods of interest. They are called on the event loop between two
    tokens, so return at once."""

    def opened(self, turn: ObservedTurn) -> None:
        """Note that the turn was submitted to the engine. `closed` is called when it ends."""

    def first_token(self, turn: ObservedTurn, answer: Answer) -> None:
        """Note that the first tokens of an answer have come. Its report says where the KV of the prompt came from."""

    def gap(self, turn: ObservedTurn, seconds: float) -> None:
        """Note that later tokens have come. seconds: the time since the previous ones, per token."""

    def ended(self, turn: ObservedTurn, answer: Answer) -> None:
        """Note that an answer is complete. Not called if an error ends it or its client leaves."""

    def failed(self, turn: ObservedTurn, error: ApiError) -> None:
        """Note that the engine refused the turn or lost it, maybe in the middle of a stream."""

    def closed(self, turn: ObservedTurn) -> None:
        """Note that the turn has ended, for whatever reason. Called once per turn, in the task of its request."""


class Observers(TurnObserver):
    """A group of observers that acts as one. If one raises, that is logged, and harms neither the turn nor the
    others."""

    def __init__(self, observers: Sequence[TurnObserver]) -> None:
        self._observers = observers

    def opened(self, turn: ObservedTurn) -> None:
        self._tell(lambda observer: observer.opened(turn))

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
