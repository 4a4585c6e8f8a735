import asyncio
import threading
from typing import Any

from app.text_thread import TextThread


class SlowTranscripts:
    """Blocks until told to go on, and remembers who called what from where."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def _call(self, name: str) -> None:
        assert self.gate.wait(5)
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)

    def prepare(self, *, text: str) -> str:
        self._call(f"prepare {text}")
        return text.upper()

    def record(self, prompt: Any, *, text: str) -> None:
        self._call(f"record {text}")
        if text == "bad":
            raise OSError("disk on fire")

    def sweep(self, now: float) -> int:
        self._call("sweep")
        return 0

    def close(self) -> None:
        self._call("close")


async def test_the_loop_runs_on_and_the_order_is_kept(caplog):
    slow = SlowTranscripts()
    text = TextThread(slow)  # type: ignore[arg-type]
    text.record(None, text="one")  # type: ignore[arg-type]
    text.record(None, text="bad")  # type: ignore[arg-type]
    preparing = asyncio.create_task(text.prepare(text="a"))
    await asyncio.sleep(0.02)  # would not return if the thread held the loop
    assert slow.calls == []
    also = asyncio.create_task(text.prepare(text="b"))
    await asyncio.sleep(0)
    given_up = asyncio.create_task(text.prepare(text="c"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    await asyncio.sleep(0)
    text.sweep(0.0)
    slow.gate.set()
    assert (await preparing, await also) == ("A", "B")
    await text.close()
    assert slow.calls == ["record one", "record bad", "prepare a", "prepare b", "sweep", "close"]
    assert len(slow.threads) == 1
    assert threading.current_thread().name not in slow.threads
    assert "disk on fire" in caplog.text
