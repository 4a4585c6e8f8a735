"""uvicorn with a graceful end: after SIGTERM or SIGINT, running answers continue and new requests are told to retry."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

from fastapi import FastAPI

from reprise.app.http.bounded_server import LAST_WORDS_S, BoundedServer
from reprise.app.settings.settings import Settings
from reprise.app.turn.ports import EnginePort
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.service import TurnService
from reprise.engine.messages import ModelInfo
from reprise.engine.process.client import EngineFailed

log = logging.getLogger(__name__)


def log_failure(problem: str) -> None:
    log.error("the model cannot be served: %s", problem)


class HttpServer(BoundedServer):
    """A server for the app. When `run` has returned, `failure` says why a model could not be served, and `force_exit`
    whether a third signal cut the answers off."""

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        *,
        on_ready: Callable[[ModelInfo, str], None],
        on_failure: Callable[[str], None] = log_failure,
    ) -> None:
        """Set up. One of the two callbacks is called as soon as it is known whether the model can be served: `on_ready`
        with the model and the server's address, or `on_failure` with the reason."""
        super().__init__(app, settings)
        self.failure: str | None = None
        self._service: TurnService = app.state.service
        self._readiness: Readiness = app.state.readiness
        self._engine: EnginePort = app.state.engine
        self._drain_s = settings.server.drain_s
        self._on_ready, self._on_failure = on_ready, on_failure
        self._drain_started_s: float | None = None
        self._ended_all = False
        self._announcing: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal: refuse new requests while answers continue. End running answers early after the
        second, and exit at once after the third. With `server.drain_s` 0 the second signal already exits."""
        if self._drain_started_s is None:
            self._drain_started_s = time.monotonic()
            self._readiness.draining = True
        elif self._drain_s > 0:
            self._drain_started_s, self._drain_s = time.monotonic(), 0.0
        else:
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._readiness.failure is not None:  # also one that comes after the model
            self._fail(self._readiness.failure)
        if self._drain_started_s is not None:
            waited_s = time.monotonic() - self._drain_started_s
            if not self._service.generations or waited_s >= self._drain_s + LAST_WORDS_S:
                self.should_exit = True
            elif waited_s >= self._drain_s and not self._ended_all:
                self._ended_all = True
                await self._service.hand_over()
                self._engine.finish_all()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announcing = asyncio.create_task(self._announce(self.url))

    async def _announce(self, url: str) -> None:
        try:
            self._on_ready(await self._readiness.wait_loaded(), url)
        except EngineFailed as error:
            self._fail(str(error))

    def _fail(self, problem: str) -> None:
        """Say once why the server ends, and end it. A server that was told to stop while the model was loading has not
        failed."""
        if self.failure is None and self._drain_started_s is None:
            self.failure = problem
            self._on_failure(problem)
            self.should_exit = True
