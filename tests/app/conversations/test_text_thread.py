import asyncio
import threading
from typing import Any

from reprise.app.conversations.text_thread import LONG_CHARS, TextThread, _is_long


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

    def prepare(self, *, tenant: str, messages: list[dict[str, str]], text: str) -> str:
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
    preparing = asyncio.create_task(text.prepare(tenant="t", messages=[], text="a"))
    await asyncio.sleep(0.02)  # would not return if the thread held the loop
    assert slow.calls == []
    also = asyncio.create_task(text.prepare(tenant="t", messages=[], text="b"))
    await asyncio.sleep(0)
    given_up = asyncio.create_task(text.prepare(tenant="t", messages=[], text="c"))
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


async def test_long_texts_hold_up_neither_short_ones_nor_other_tenants():
    slow = SlowTranscripts()
    recorded = threading.Event()
    gate = slow.gate
    slow.record = lambda *_, **__: recorded.set()  # type: ignore[method-assign, assignment]
    text = TextThread(slow)  # type: ignore[arg-type]
    long = [{"role": "user", "content": "x" * LONG_CHARS}]
    first = [asyncio.create_task(text.prepare(tenant="a", messages=long, text=f"a{n}")) for n in range(3)]
    await asyncio.sleep(0.02)
    other = asyncio.create_task(text.prepare(tenant="b", messages=long, text="b"))
    await asyncio.sleep(0.02)
    text.record(None)  # type: ignore[arg-type]
    assert await asyncio.to_thread(recorded.wait, 5)  # while a long text is under way
    gate.set()
    assert await asyncio.gather(*first, other) == ["A0", "A1", "A2", "B"]
    await text.close()
    assert slow.calls == ["prepare a0", "prepare b", "prepare a1", "prepare a2", "close"]


def test_long_arguments_of_a_call_make_a_text_long():
    call = {"id": "call_1", "function": {"name": "save", "arguments": {"text": ["x" * LONG_CHARS]}}}
    assert _is_long([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert not _is_long([{"role": "user", "content": "x" * (LONG_CHARS - len("user") - 1)}])
