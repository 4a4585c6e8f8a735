"""Serves the app with the scripted engine on its own port, in a thread, while the test's thread drives a browser."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reprise.app.observe.live import Live
from reprise.fleet.records import Heartbeat
from tests.app.fakes import FakeEngine, make_settings, on_loopback, write_tokenizer
from tests.fleet.gateway.harness import LOAD, Fleet, fleet

T = TypeVar("T")


@dataclass
class Served:
    """`engine` may be changed from any thread: its script is read when an answer begins."""

    url: str
    engine: FakeEngine
    live: Live


@dataclass
class ServedFleet:
    """A gateway before one server, the replica `a`. It looks once a second at `reprise.fleet.directory`, whose beats
    may be changed from any thread."""

    url: str
    engine: FakeEngine
    fleet: Fleet

    def hear(self, name: str, *, age_s: float = 0.0, **changes: Any) -> None:
        """Let another replica beat, at whose address nobody answers."""
        known = self.fleet.directory.beats["a"][0]
        fields = {"url": "http://127.0.0.1:9", "fingerprint": known.fingerprint, "model": known.model, "load": LOAD}
        beat = Heartbeat(**{"replica": name, "boot": "1", "state": "ready", **fields, **changes})
        self.fleet.directory.beats[name] = beat, age_s


@contextlib.contextmanager
def served(directory: Path, **sections: dict[str, Any]) -> Iterator[Served]:
    with _in_thread(_app(directory, **sections)) as app:
        yield app


@contextlib.contextmanager
def served_fleet(directory: Path, **sections: dict[str, Any]) -> Iterator[ServedFleet]:
    """sections: settings of the gateway."""
    with _in_thread(_gateway(directory, sections)) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def _app(directory: Path, **sections: dict[str, Any]) -> AsyncIterator[Served]:
    write_tokenizer(directory / "model")
    engine = FakeEngine(directory=directory / "model")
    async with on_loopback(engine, make_settings(directory / "state", **sections)) as running:
        yield Served(running.base_url, engine, running.app.state.live)


@contextlib.asynccontextmanager
async def _gateway(directory: Path, sections: dict[str, Any]) -> AsyncIterator[ServedFleet]:
    async with _app(directory, **sections) as app, fleet(sections) as whole:
        model = app.engine.model
        assert model is not None
        beat = Heartbeat(
            replica="a",
            boot="1",
            url=app.url,
            fingerprint=model.fingerprint,
            model=model.name,
            state="ready",
            load=LOAD,
        )
        app.live.replica = "a"
        whole.directory.beats["a"] = beat, 0.0
        await whole.refresh()
        yield ServedFleet(f"http://127.0.0.1:{whole.port}", app.engine, whole)


@contextlib.contextmanager
def _in_thread(serving: AbstractAsyncContextManager[T]) -> Iterator[T]:
    started = threading.Event()
    found: list[T] = []
    ends: list[Callable[[], object]] = []

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with serving as served:
            found.append(served)
            started.set()
            await stop.wait()

    def main() -> None:
        try:
            asyncio.run(run())
        finally:
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    assert started.wait(20)
    try:
        yield found[0]
    finally:
        ends[0]()
        thread.join(20)
