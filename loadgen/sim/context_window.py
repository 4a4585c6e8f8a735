"""What a full context window drops, before a turn and in the middle of its answer (AttentionStore §3.4)."""

import math

from loadgen.sim.machine import Config, Machine
from loadgen.sim.result import TurnRecord
from loadgen.sim.store import Store
from loadgen.sim.turn import LiveSession


class ContextWindow:
    def __init__(self, machine: Machine, config: Config, store: Store) -> None:
        self._window = machine.window
        self._config = config
        self._store = store

    def fit_prompt(self, session: LiveSession, record: TurnRecord) -> None:
        """A prompt that leaves no room for its answer loses the head of its history."""
        window, reserved = self._window, self._reserved(record.answer_tokens)
        if record.new_tokens > window - reserved:
            record.clipped_tokens = record.new_tokens - (window - reserved)
            record.new_tokens = window - reserved
        if session.context + record.new_tokens > window - reserved:
            self._cut(session, window - reserved - record.new_tokens, record)
        record.history_tokens = session.context

    def overflow(self, session: LiveSession, record: TurnRecord, left: int) -> None:
        """The window is full, and `left` tokens of the answer are to come."""
        self._cut(session, self._window - self._reserved(left), record)

    def _reserved(self, answer_tokens: int) -> int:
        return min(answer_tokens, max(1, int(self._config.answer_share * self._window)))

    def _cut(self, session: LiveSession, room: int, record: TurnRecord) -> None:
        """Drop so many ratios of the window that the context fits into `room`."""
        context = session.context
        ratio = max(1, int(self._config.truncation_ratio * self._window))
        dropped = min(context, ratio * math.ceil((context - room) / ratio))
        if granule := self._config.granule_tokens:
            # Whole granules; those that are not full stand at the end.
            dropped = context if dropped == context else dropped // granule * granule
            if context - dropped > room:
                dropped = min(context, dropped + granule)
        record.cut_tokens += dropped
        session.context -= dropped
        if self._config.truncation == "decoupled":
            self._store.cut(session.name, dropped)
        else:
            self._store.invalidate(session.name)
