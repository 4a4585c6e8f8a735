"""Provides knowledge of the future for Belady's policy: when each session's next turn starts."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies.belady import BeladyPolicy
from reprise.loadgen.sim.turn import TurnRecord


class NextTurns:
    """The start times of one run's turns, for another run of the same workload."""

    def __init__(self, records: Iterable[TurnRecord]) -> None:
        self._starts_s: dict[str, list[float]] = {}
        self._turns: Counter[str] = Counter()  # session -> number of its turns that have arrived
        for record in records:
            self._starts_s.setdefault(record.session_id, []).append(record.started_s)

    def arrived(self, session: str) -> None:
        """Record that a turn of this session has arrived. `start_s` then returns the start of the turn after it."""
        self._turns[session] += 1

    def start_s(self, session: str) -> float:
        """Return the start of the session's next turn; math.inf if there is none."""
        starts_s, turn = self._starts_s[session], self._turns[session]
        return starts_s[turn] if turn < len(starts_s) else math.inf


class ByNextTurn(BeladyPolicy):
    """Belady's policy for sessions. A granule (the unit in which a simulated tier stores KV) is used next when its
    session's next turn starts."""

    def __init__(self, turns: NextTurns) -> None:
        super().__init__(self)
        self._turns = turns
        self._sessions: dict[BlockKey, str] = {}

    def next_use(self, key: BlockKey) -> float:
        return self._turns.start_s(self._sessions[key])

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        self._sessions[key] = str(session)
