"""Models what a full context window drops, before a turn and in the middle of its answer (AttentionStore §3.4)."""

import math

from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.store import SimulatedStore
from reprise.loadgen.sim.turn import LiveSession, TurnRecord


class ContextWindow:
    def __init__(self, machine: Machine, config: Config, store: SimulatedStore) -> None:
        self._window = machine.window
        self._config = config
        self._store = store

    def fit_prompt(self, session: LiveSession, record: TurnRecord) -> int:
        """Shorten the history of a turn whose prompt would leave no room in the window for its answer. Returns the
        number of tokens that `drop` must remove from saved KV when the turn starts; until then the tiers hold all of
        it."""
        window, reserved = self._window, self._reserved(record.answer_tokens)
        if record.new_tokens > window - reserved:
            record.clipped_tokens = record.new_tokens - (window - reserved)
            record.new_tokens = window - reserved
        dropped = 0
        if session.context + record.new_tokens > window - reserved:
            dropped = self._cut(session, window - reserved - record.new_tokens, record)
        record.history_tokens = session.context
        return dropped

    def overflow(self, session: LiveSession, record: TurnRecord, left: int) -> None:
        """Drop the beginning of the context of a turn whose window is full, and of its saved KV. left: tokens of the
        answer that are still to come."""
        self.drop(session, self._cut(session, self._window - self._reserved(left), record))

    def drop(self, session: LiveSession, num_tokens: int) -> None:
        """Remove the first `num_tokens` tokens from a session's saved KV. With truncation "coupled" all of its saved KV
        is lost, because keys are saved with positions that the cut changes."""
        if num_tokens and self._config.truncation == "decoupled":
            self._store.cut(session.name, num_tokens)
        elif num_tokens:
            self._store.invalidate(session.name)

    def _reserved(self, answer_tokens: int) -> int:
        return min(answer_tokens, max(1, int(self._config.answer_share * self._window)))

    def _cut(self, session: LiveSession, room: int, record: TurnRecord) -> int:
        """Drop the beginning of a context until the rest fits into `room`, in multiples of `truncation_ratio` of the
        window. Returns the tokens dropped."""
        context = session.context
        ratio = max(1, int(self._config.truncation_ratio * self._window))
        dropped = min(context, ratio * math.ceil((context - room) / ratio))
        if granule := self._config.granule_tokens:
            # Whole granules only; an incomplete one can only be the last.
            dropped = context if dropped == context else dropped // granule * granule
            if context - dropped > room:
                dropped = min(context, dropped + granule)
        record.cut_tokens += dropped
        session.context -= dropped
        return dropped
