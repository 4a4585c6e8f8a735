"""Tests of what is left of a capture that fails, on a stand-in for graphs that leaves what torch 2.11 leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from reprise.engine.model.cuda.capture import CaptureOnCuda


class Allocator:
    """CUDA's caching allocator as far as graphs use it."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.streams = ["main"]
        self.freed = 0
        self.reserved = 0

    def empty_cache(self) -> None:
        assert not self.is_capturing, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.freed += 1

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if not self.is_capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_capturing = False

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        self.streams.append("side")
        try:
            yield
        finally:
            self.streams.pop()


class Graph:
    """torch.cuda.CUDAGraph of 2.11: a capture that was invalidated ends with an error, before the allocator is told."""

    allocator: Allocator
    is_valid = True

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str = "global", **others: object) -> None:
        assert capture_error_mode == "thread_local"
        self.allocator.is_capturing = True

    def capture_end(self) -> None:
        if not Graph.is_valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.allocator.end(0, (0, 1))

    def replay(self) -> None:
        pass


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(Graph, "allocator", made, raising=False)
    monkeypatch.setattr(Graph, "is_valid", True)
    fakes = {
        "CUDAGraph": Graph,
        "Stream": SimpleNamespace,
        "stream": made.on,
        "synchronize": lambda: None,
        "empty_cache": made.empty_cache,
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0,
        "memory_reserved": lambda: made.reserved,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return made


def refuse() -> None:
    Graph.is_valid = False
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def lack() -> None:
    raise torch.OutOfMemoryError("2 GiB")


@pytest.mark.parametrize(("call", "says"), [(refuse, "not permitted"), (lack, "2 GiB")])
def test_after_a_capture_that_failed_the_allocator_goes_on(allocator: Allocator, call: object, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        CaptureOnCuda()(call)  # type: ignore[arg-type]
    torch.cuda.empty_cache()
    assert allocator.streams == ["main"], "what is launched later would go to the stream of the capture"


def test_a_capture_replays_and_its_memory_is_counted(allocator: Allocator) -> None:
    capture = CaptureOnCuda()

    def take() -> None:
        assert allocator.is_capturing
        allocator.reserved += 1000

    replay = capture(take)
    replay()
    assert not allocator.is_capturing
    assert capture.held_bytes == 1000
