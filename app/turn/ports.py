"""Describes what a turn needs of the engine, and of the fleet that its server belongs to."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise.engine.messages import (
    Adopt,
    ModelInfo,
    Output,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
)
from reprise.fleet.keys import SessionName


class OutputSource(Protocol):
    """Yields the outputs of all choices of a request, interleaved. `reprise.engine.process.client.OutputStream` is
    one."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    async def aclose(self) -> None: ...


class EnginePort(Protocol):
    """The part of `reprise.engine.process.client.EngineClient` that the app uses; the tests have a scripted one."""

    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def model(self) -> ModelInfo | None: ...
    @property
    def stats(self) -> Stats | None: ...
    @property
    def restarts(self) -> int: ...

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def wait_ready(self) -> None: ...
    async def submit(self, request: Submit) -> OutputSource: ...
    async def sessions(self, request: SessionRequest | Adopt, *, timeout_s: float) -> SessionReply: ...
    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None: ...
    def finish_all(self) -> None: ...


def codec_in_use(model: ModelInfo, stats: Stats | None) -> str:
    """Return the codec that KV may go through by what the engine said last; raw: none, or one that was condemned."""
    return "raw" if stats is not None and stats.codec_condemned else model.codec


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """An answer as the client has it: its text without reasoning, and its calls as (name, arguments in JSON)."""

    text: str
    calls: tuple[tuple[str, str], ...]


class TurnOfFleet(Protocol):
    """A turn from its claim to its commit. `reprise.fleet.replica.turn_under_way.TurnUnderWay` is one."""

    async def end(
        self,
        choices: Sequence[EndedChoice],
        *,
        chain: bytes | None,
        names: Sequence[bytes],
        tokens: int,
        ttl_s: float | None,
    ) -> None: ...

    def give_up(self) -> None: ...


class FleetPort(Protocol):
    """The fleet, as `reprise.app.turn.service` knows it."""

    async def claim(self, name: SessionName) -> bool: ...
    def spend(self, tenant: str, tokens: int) -> None: ...
    async def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None: ...
    def begin(self, *, tenant: str, session_id: str, salt: str, model: ModelInfo) -> TurnOfFleet: ...
    async def delete(self, session_id: str, *, tenant: str) -> None: ...
