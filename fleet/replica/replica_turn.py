"""Accompanies a turn at a replica: claims its session, continues a turn that another replica began, commits its end."""

import time
from typing import Protocol

from reprise.app.turn.ports import Begun, RunningTurn
from reprise.engine.messages import ModelInfo, Submit
from reprise.fleet.identify import response_digest
from reprise.fleet.keys import SessionName
from reprise.fleet.replica.resume import ResumedTurn
from reprise.fleet.replica.turn_under_way import EndedChoice, TurnUnderWay


class TurnHome(Protocol):
    """The part of the replica that turns use."""

    @property
    def ttl_s(self) -> float:
        """Seconds that a session lives if its client sets no other time."""
        ...

    async def claim(self, name: SessionName) -> bool: ...
    def begin(self, *, tenant: str, session_id: str, salt: str) -> TurnUnderWay: ...
    def spend(self, tenant: str, tokens: int) -> None: ...


class ReplicaTurn:
    """The hooks that make one turn part of the fleet: they implement `reprise.app.turn.ports.TurnHooks`."""

    def __init__(
        self,
        home: TurnHome,
        tenant: str,
        *,
        chain: bytes | None = None,
        resumed: ResumedTurn | None = None,
        is_counted: bool = False,
        can_move: bool = False,
    ) -> None:
        """Set up. chain: digest of the messages that a gateway computed; see `reprise.fleet.identify`. resumed: another
        replica's notes of the turn, if this replica continues it. is_counted: whether another server counts the turn
        against the limits of its API key. can_move: whether another server would continue the turn if this one stopped
        it."""
        self.is_new = resumed is None
        self.is_counted = is_counted
        self.can_move = can_move
        self._home, self._tenant, self._chain, self._resumed = home, tenant, chain, resumed
        self._under_way: TurnUnderWay | None = None
        self._keep_s = 0.0

    def admit(self, session_id: str | None, model: ModelInfo) -> str | None:
        """Return the id of the turn's session: `session_id`, or for a resumed answer that of the replica that began it.
        Raises ApiError 409 if that replica has another model or another `model.exact`."""
        if self._resumed is None:
            return session_id
        self._resumed.check(model)
        return self._resumed.note.session_id

    async def claim(self, session_id: str, salt: str) -> bool:
        return await self._home.claim(SessionName(self._tenant, session_id, salt))

    def resume(self, submit: Submit) -> Submit:
        return submit if self._resumed is None else self._resumed.submit(submit)

    def begin(self, submit: Submit, *, keep_s: float | None) -> Begun:
        self._under_way = self._home.begin(tenant=self._tenant, session_id=submit.session_id, salt=submit.cache_salt)
        self._keep_s = self._home.ttl_s if keep_s is None else keep_s
        if (resumed := self._resumed) is None:
            return Begun(submit.request_id, int(time.time()))
        return Begun(resumed.note.request_id, resumed.created, resumed.num_tokens(submit.num_choices))

    def spend(self, tokens: int) -> None:
        self._home.spend(self._tenant, tokens)

    async def end(self, turn: RunningTurn) -> None:
        """Commit the turn to the directory before the client sees its end, so that every member then finds the turn.
        Commits nothing if no token was generated or another replica continues the answer."""
        if self._under_way is None:
            return
        said = [choice for choice in turn.choices if choice.token_ids]
        if not said or turn.is_handed_over:  # another member goes on, and enters all of it
            self._under_way.give_up()
            return
        await self._under_way.end(
            [
                EndedChoice(choice.content, tuple((call.name, call.arguments) for call in choice.calls))
                for choice in said
            ],
            chain=self._chain,
            names=[response_digest(response_id) for response_id in turn.response_ids],
            tokens=len(turn.token_ids) + max(len(choice.token_ids) for choice in said),
            ttl_s=self._keep_s,
        )
