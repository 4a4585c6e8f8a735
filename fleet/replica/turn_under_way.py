"""Follows a turn in a fleet, from its claim to its commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise.fleet.identify import link_answer
from reprise.fleet.keys import SessionName


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """An answer in the form that the client received: its text without reasoning, and its calls as (name, arguments in
    JSON)."""

    text: str
    calls: tuple[tuple[str, str], ...]


class Home(Protocol):
    """The methods that a turn calls on the replica at which it runs."""

    async def commit(
        self, name: SessionName, *, tokens: int, ttl_s: float | None, chains: tuple[bytes, ...]
    ) -> None: ...

    def left(self, name: SessionName) -> None: ...


class TurnUnderWay:
    """A turn that runs here. This replica is the home of its session (it may commit), or would be if the directory had
    answered."""

    def __init__(self, home: Home, name: SessionName) -> None:
        self._home, self._name = home, name
        self._ended = False

    async def end(
        self,
        choices: Sequence[EndedChoice],
        *,
        chain: bytes | None,
        names: Sequence[bytes],
        tokens: int,
        ttl_s: float | None,
    ) -> None:
        """Commit the turn; only the first call has an effect. Waits for the directory as long as `fleet.deadline_ms`
        says; a turn that is not recorded by then is committed later. chain: digest of the request's messages, see
        `reprise.fleet.identify`; None: the next request does not find the session by its messages. names: further
        digests by which a request finds the session, such as that of a response's id. tokens: length of the session's
        context. ttl_s: time after its last use until the session expires; None: it is pinned."""
        if self._ended:
            return
        self._ended = True
        chains = [link_answer(chain, choice.text, choice.calls) for choice in choices] if chain is not None else []
        await self._home.commit(self._name, tokens=tokens, ttl_s=ttl_s, chains=(*chains, *names))

    def give_up(self) -> None:
        """Note that the turn has ended here with nothing to commit: no token was generated, or another replica
        continues the answer."""
        if not self._ended:
            self._ended = True
            self._home.left(self._name)
