"""Provides the hooks of a server that shares no conversations with others; they change nothing."""

import time
from collections.abc import Mapping
from typing import Protocol

from reprise.app.schemas.fields import SESSION_HEADERS
from reprise.app.turn.ports import ArrivedRequest, Begun, Deltas, Frames, Overview, RunningTurn, TurnHooks
from reprise.engine.messages import ModelInfo, Submit


class LoneTurn:
    """The hooks of a turn in which no other server has a part."""

    is_new = True
    is_counted = False
    can_move = False

    def admit(self, session_id: str | None, model: ModelInfo) -> str | None:
        return session_id

    async def claim(self, session_id: str, salt: str) -> bool:
        return False

    def resume(self, submit: Submit) -> Submit:
        return submit

    def begin(self, submit: Submit, *, keep_s: float | None) -> Begun:
        return Begun(submit.request_id, int(time.time()))

    def spend(self, tokens: int) -> None:
        """Do nothing: this server counts the tokens itself."""

    async def end(self, turn: RunningTurn) -> None:
        """Do nothing: no other server has to find the turn."""


class LoneRequest:
    """A request that has arrived directly from its client."""

    is_counted = False
    elapsed_s = 0.0
    session_headers = SESSION_HEADERS
    added_bytes = 0
    stream_headers: Mapping[str, str] = {}

    def open_body(self, data: bytes) -> bytes:
        return data

    def turn(self, place: int) -> TurnHooks:
        return LoneTurn()

    def stream(self, deltas: Deltas, frames: Frames) -> tuple[Deltas, Frames]:
        return deltas, frames


class DeleteHere(Protocol):
    async def __call__(self, session_id: str, *, tenant: str) -> None: ...


class LoneServer:
    """The hooks of a server without a fleet. One per app."""

    name = ""
    overview: Overview | None = None

    def __init__(self, delete_here: DeleteHere) -> None:
        self._delete_here = delete_here

    def arrive(self, *, tenant: str, path: str, request_id: str, headers: Mapping[str, str]) -> ArrivedRequest:
        return LoneRequest()

    def background_id(self, response_id: str) -> str:
        return response_id

    async def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """Do nothing: no other server keeps the session."""

    async def delete(self, session_id: str, *, tenant: str) -> None:
        await self._delete_here(session_id, tenant=tenant)

    async def run(self) -> None:
        """Do nothing, and return."""

    async def leave(self) -> None:
        """Do nothing: no other server has to know."""
