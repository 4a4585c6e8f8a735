"""The clairvoyant's knowledge: when each session's next turn starts, as of the turn that is served."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable

from cache.blocks.keys import BlockKey
from cache.policies.belady import BeladyPolicy
from loadgen.sim.turn import TurnRecord


class NextTurns:
    """The turns of a run, for another run of the same workload."""

    def __init__(self, records: Iterable[TurnRecord]) -> None:
        self._starts_s: dict[str, list[float]] = {}
        self._turns: Counter[str] = Counter()  # session -> turns that have come
        for record in records:
            self._starts_s.setdefault(record.session_id, []).append(record.started_s)

    def arrived(self, session: str) -> None:
        """A turn has come."""
        self._turns[session] += 1

    def start_s(self, session: str) -> float:
        """Of the next turn; math.inf: there is none."""
        starts_s, turn = self._starts_s[session], self._turns[session]
        return starts_s[turn] if turn < len(starts_s) else math.inf


class ByNextTurn(BeladyPolicy):
    """Belady for what belongs to sessions: a granule is used next when its session's next turn starts."""

    def __init__(self, turns: NextTurns) -> None:
        super().__init__(self)
        self._turns = turns
        self._sessions: dict[BlockKey, str] = {}

    def next_use(self, key: BlockKey) -> float:
        return self._turns.start_s(self._sessions[key])

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        self._sessions[key] = str(session)
