"""uvicorn with a graceful end: after SIGTERM or SIGINT, running answers continue and new requests are told to retry."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from app.http.connections import BoundedConnection, raise_file_limit
from app.settings.settings import Settings
from app.turn.ports import EnginePort
from app.turn.readiness import Readiness
from app.turn.service import TurnService
from engine.messages import ModelInfo
from engine.process.client import EngineFailed

LAST_WORDS_S = 5.0  # after drain_s, for the engine to end its answers and for the last bytes to be sent
KEEP_ALIVE_S = 75  # longer than the minute after which clients' pools drop idle connections


log = logging.getLogger(__name__)


def log_failure(problem: str) -> None:
    log.error("the model cannot be served: %s", problem)


class HttpServer(uvicorn.Server):
    """Serves the app. When `run` has returned, `failure` says why a model could not be served, and `force_exit` whether
    a third signal cut the answers off."""

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        *,
        on_ready: Callable[[ModelInfo, str], None],
        on_failure: Callable[[str], None] = log_failure,
    ) -> None:
        """One of the two callbacks is called, as soon as it is known whether the model can be served."""
        config = uvicorn.Config(
            app,
            host=settings.server.host,
            port=settings.server.port,
            http=partial(  # type: ignore[arg-type]  # it asks for a class, and calls it
                BoundedConnection,
                most=settings.limits.connections,
                header_timeout_s=settings.limits.header_timeout_s,
            ),
            h11_max_incomplete_event_size=settings.limits.header_bytes,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )
        super().__init__(config)
        self.failure: str | None = None
        self._service: TurnService = app.state.service
        self._readiness: Readiness = app.state.readiness
        self._engine: EnginePort = app.state.engine
        self._most_connections = settings.limits.connections
        self._drain_s = settings.server.drain_s
        self._on_ready, self._on_failure = on_ready, on_failure
        self._drain_started_s: float | None = None
        self._ended_all = False
        self._announcing: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal, end running answers early after the second, exit at once after the third."""
        if self._drain_started_s is None:
            self._drain_started_s = time.monotonic()
            self._readiness.draining = True
        elif self._drain_s > 0:
            self._drain_started_s, self._drain_s = time.monotonic(), 0.0
        else:
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drain_started_s is not None:
            waited_s = time.monotonic() - self._drain_started_s
            if not self._service.generations or waited_s >= self._drain_s + LAST_WORDS_S:
                self.should_exit = True
            elif waited_s >= self._drain_s and not self._ended_all:
                self._ended_all = True
                self._engine.finish_all()
        return await super().on_tick(counter)

    def serve_forever(self) -> None:
        """Bind the port before loading the model, so that an occupied port is reported at once. Raises OSError."""
        raise_file_limit(self._most_connections)
        host, port = self.config.host, self.config.port
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family, backlog=self.config.backlog) as listener:
            self.run(sockets=[listener])

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._announcing = asyncio.create_task(self._announce(url))

    async def _announce(self, url: str) -> None:
        try:
            self._on_ready(await self._readiness.wait_loaded(), url)
        except EngineFailed as error:
            if self._drain_started_s is not None:
                return  # told to stop while the model was loading: nothing has failed
            self.failure = str(error)
            self._on_failure(self.failure)
            self.should_exit = True
