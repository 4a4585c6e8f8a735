"""Runs a real engine inside the event loop, in the place of `reprise.engine.process.client.EngineClient`."""

import asyncio
import time
from pathlib import Path
from typing import Any

from reprise.engine.messages import Output, SessionReply, SessionRequest, Submit
from reprise.engine.process.stream import OutputStream
from tests.engine.driver import config
from tests.engine.ready_models import engine_of


class EngineHere:
    """One engine on a model directory, stepped between the tasks of the app."""

    def __init__(self, model: Path, **changes: Any) -> None:
        """changes: of the engine's config, as `tests.engine.driver.config` takes them."""
        self.engine = engine_of(config(model, **changes))
        self.model, self.state, self.failure, self.restarts = self.engine.model, "stopped", None, 0
        self.submitted: list[Submit] = []
        self._streams: dict[str, OutputStream] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def stats(self) -> Any:
        return self.engine.stats()

    async def start(self) -> None:
        self.state = "ready"
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        self.state = "stopped"
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
        self.engine.close()

    async def wait_ready(self) -> None:
        """It is ready from the start."""

    async def submit(self, request: Submit) -> OutputStream:
        self.submitted.append(request)
        stream = self._streams[request.request_id] = OutputStream(request, abort=self.abort)
        self._take(self.engine.accept(request, time.monotonic()))
        return stream

    async def sessions(self, request: SessionRequest, *, timeout_s: float) -> SessionReply:
        return self.engine.sessions(request, time.monotonic())[0]

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        self._streams[request_id].finish(choice)
        self.engine.finish(request_id, choice, keep_tokens)

    def finish_all(self) -> None:
        self._take(self.engine.finish_all(time.monotonic()))

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._streams[output.request_id].push(output)

    async def _step(self) -> None:
        while True:
            self.engine.poll(time.monotonic())
            if self.engine.has_work():
                self._take(self.engine.step(time.monotonic()))
            await asyncio.sleep(0 if self.engine.has_work() else 0.005)
