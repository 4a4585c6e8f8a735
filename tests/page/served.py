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
from tests.app.fakes import FakeEngine, make_settings, on_loopback, write_tokenizer

T = TypeVar("T")


@dataclass
class Served:
    """`engine` may be changed from any thread: its script is read when an answer begins."""

    url: str
    engine: FakeEngine
    live: Live


@contextlib.contextmanager
def served(directory: Path, **sections: dict[str, Any]) -> Iterator[Served]:
    with in_thread(app_here(directory, **sections)) as app:
        yield app


@contextlib.asynccontextmanager
async def app_here(directory: Path, **sections: dict[str, Any]) -> AsyncIterator[Served]:
    """The app around the scripted engine, on the loop of the caller."""
    write_tokenizer(directory / "model")
    engine = FakeEngine(directory=directory / "model")
    async with on_loopback(engine, make_settings(directory / "state", **sections)) as running:
        yield Served(running.base_url, engine, running.app.state.live)


@contextlib.contextmanager
def in_thread(serving: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Serve on a loop in a thread of its own, until the caller is done."""
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
