"""Serves the app with the scripted engine on its own port, in a thread, while the test's thread drives a browser."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.observe.live import Live
from tests.app.fakes import FakeEngine, make_settings, on_loopback, write_tokenizer


@dataclass
class Served:
    """`engine` may be changed from any thread: its script is read when an answer begins."""

    url: str
    engine: FakeEngine
    live: Live


@contextlib.contextmanager
def served(directory: Path, **sections: dict[str, Any]) -> Iterator[Served]:
    write_tokenizer(directory / "model")
    started = threading.Event()
    found: list[Served] = []
    ends: list[Callable[[], None]] = []

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))  # type: ignore[arg-type,return-value]
        engine = FakeEngine(directory=directory / "model")
        async with on_loopback(engine, make_settings(directory / "state", **sections)) as running:
            found.append(Served(running.base_url, engine, running.app.state.live))
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
