"""Records the work of a call on a CUDA device as a graph, which one launch repeats."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Replay = Callable[[], None]


class Capture(Protocol):
    """A recorder of CUDA graphs. Called by the engine's thread."""

    @property
    def held_bytes(self) -> int:
        """The bytes of device memory that all graphs take together."""
        ...

    def __call__(self, call: Callable[[], None]) -> Replay:
        """Record the work that a call gives to the device, and return a function that repeats it. Raises RuntimeError
        if some of it cannot be recorded, or has no memory (`reprise.kernels.device_errors`)."""
        ...


class CaptureOnCuda:
    """A recorder of CUDA graphs that share their memory. So the results of one graph must be used before another is
    replayed.

    `torch.cuda.graph` is not used: after a capture that fails, it leaves the capturing stream as the current one. In
    torch 2.11 it also leaves the allocator in capturing mode, in which it refuses to free what it keeps.
    """

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self.held_bytes = 0

    def __call__(self, call: Callable[[], None]) -> Replay:
        """Record the work that a call gives to the device, and return a function that repeats it."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a capture may not free what the allocator keeps
        before = torch.cuda.memory_reserved()
        with torch.cuda.stream(self._stream):
            try:
                # Other threads copy KV on streams of their own meanwhile.
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    call()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()  # its error would say less than the first one
                    raise
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):  # it has ended, where torch does that by itself
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
                raise
            finally:
                self.held_bytes += torch.cuda.memory_reserved() - before
        return graph.replay
