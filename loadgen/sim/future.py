"""The clairvoyant's knowledge: when each session's next turn starts, as of the turn that is served."""

import math
from collections.abc import Callable, Hashable, Iterable

from cache.block import BlockKey
from cache.policies.base import EvictionPolicy
from cache.policies.belady import BeladyPolicy
from loadgen.sim.result import TurnRecord


class ByNextTurn(BeladyPolicy):
    """Belady for what belongs to sessions: a granule is used next when its session's next turn starts."""

    def __init__(self, starts_s: dict[str, list[float]]) -> None:
        super().__init__(self)
        self._starts_s = starts_s
        self._sessions: dict[BlockKey, str] = {}
        self._turns: dict[str, int] = {}  # session -> turns that have come

    def next_use(self, key: BlockKey) -> float:
        session = self._sessions[key]
        starts_s, turn = self._starts_s[session], self._turns.get(session, 0)
        return starts_s[turn] if turn < len(starts_s) else math.inf

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        self._sessions[key] = str(session)

    def used(self, session: Hashable, now: float, num_tokens: int | None = None) -> None:
        self._turns[str(session)] = self._turns.get(str(session), 0) + 1


def clairvoyant(records: Iterable[TurnRecord]) -> Callable[[], EvictionPolicy]:
    """A policy for every tier, from the turns of a run."""
    starts_s: dict[str, list[float]] = {}
    for record in records:
        starts_s.setdefault(record.session_id, []).append(record.started_s)
    return lambda: ByNextTurn(starts_s)
