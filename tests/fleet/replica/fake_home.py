"""The replica, as its turns see it, and a turn: without an engine, Redis or HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reprise.fleet.keys import SessionName
from reprise.fleet.replica.turn_under_way import TurnUnderWay
from tests.engine.scripted_engine import submit as scripted_submit

SUBMIT = scripted_submit("chatcmpl-2", script="s", token_ids=(1, 2, 3))


@dataclass
class FakeHome:
    """Remembers what a turn has it do."""

    ttl_s: float = 60.0
    claimed: list[SessionName] = field(default_factory=list)
    committed: list[tuple[SessionName, dict[str, Any]]] = field(default_factory=list)
    gone: list[SessionName] = field(default_factory=list)
    spent: list[tuple[str, int]] = field(default_factory=list)

    async def claim(self, name: SessionName) -> bool:
        self.claimed.append(name)
        return True

    def begin(self, *, tenant: str, session_id: str, salt: str) -> TurnUnderWay:
        return TurnUnderWay(self, SessionName(tenant, session_id, salt))

    async def commit(self, name: SessionName, **fields: Any) -> None:
        self.committed.append((name, fields))

    def left(self, name: SessionName) -> None:
        self.gone.append(name)

    def spend(self, tenant: str, tokens: int) -> None:
        self.spent.append((tenant, tokens))


@dataclass
class Said:
    """A choice that has ended."""

    token_ids: list[int]
    content: str = "Hello"
    calls: tuple[Any, ...] = ()


@dataclass
class EndedTurn:
    """The part of a generation that is read at its end."""

    choices: Sequence[Said] = (Said([4, 5]),)
    token_ids: Sequence[int] = (1, 2, 3)
    response_ids: Sequence[str] = ()
    is_handed_over: bool = False
