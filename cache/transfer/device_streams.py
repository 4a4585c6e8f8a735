"""Orders the device's work for the step and for the transfer threads: streams, and fences between them.

When a forward pass or a copy returns, it was launched, and the host goes on while the device works. The host decides
which computation or copy gets which pages. The stream of that computation or copy must wait for a fence of the stream
that used the pages before; nothing else orders the uses of a page by different streams.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Fence(Protocol):
    """A mark in a stream, after everything that was launched on it until then. May be used by any thread."""

    @property
    def is_done(self) -> bool:
        """Whether the device has done everything before the mark. Never waits."""
        ...

    def wait(self) -> None:
        """Return when the device has done everything before the mark. Raises torch.AcceleratorError where that has
        failed."""
        ...

    def seconds_since(self, earlier: "Fence") -> float:
        """Return the seconds between the moments at which the device passed two fences of one stream. It must have
        passed both."""
        ...


class DeviceStream(Protocol):
    """A queue of work for the device, which is done in order, at the same time as other streams' work. Belongs to one
    thread."""

    def launch(self, work: Callable[[], object]) -> None:
        """Call `work`, which launches computations or copies, and let the device do them after the work in this stream.
        `work` is called once, on the host: now, or at the latest while a later fence is waited for. On return the
        device may not have begun; what it reads must not change until a later fence is passed."""
        ...

    def fence(self) -> Fence:
        """Return a fence after everything that was launched until now."""
        ...

    def follow(self, fence: Fence) -> None:
        """Let everything that is launched from now on begin after another stream's fence. Does not wait."""
        ...


class DeviceStreams(Protocol):
    """The streams of one device."""

    @property
    def compute(self) -> DeviceStream:
        """The stream on which steps are computed, for the engine's thread."""
        ...

    def own(self) -> AbstractContextManager[DeviceStream]:
        """Make a stream for the calling thread. It is the thread's current stream until the end of the `with` block."""
        ...


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the streams that order work on a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class HostFence:
    """A fence on the host, where all work is done when a call returns."""

    is_done = True

    def __init__(self) -> None:
        self._made_s = time.perf_counter()

    def wait(self) -> None:
        """Return at once: everything is done."""

    def seconds_since(self, earlier: Fence) -> float:
        """Return the seconds between the moments at which two fences were made."""
        assert isinstance(earlier, HostFence)
        return self._made_s - earlier._made_s


class HostStream:
    """A stream on the host, which does all work at once."""

    def launch(self, work: Callable[[], object]) -> None:
        """Do the work now."""
        work()

    def fence(self) -> HostFence:
        """Return a fence, which is done already."""
        return HostFence()

    def follow(self, fence: Fence) -> None:
        """Do nothing: everything before the fence is done."""


class HostStreams:
    """The streams where there is no device: threads do all work themselves."""

    def __init__(self) -> None:
        self.compute = HostStream()

    def own(self) -> AbstractContextManager[HostStream]:
        """Yield a stream that works at once, for the calling thread."""
        return nullcontext(HostStream())


class CudaFence:
    """A fence of a CUDA device: an event recorded on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def is_done(self) -> bool:
        """Whether the device has passed the event. Never waits."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Return when the device has passed the event. Raises torch.AcceleratorError where that has failed."""
        self.event.synchronize()

    def seconds_since(self, earlier: Fence) -> float:
        """Return the seconds between two events of one stream, which must both have passed."""
        assert isinstance(earlier, CudaFence)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """A stream of a CUDA device: the current stream of the thread that it belongs to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(self, work: Callable[[], object]) -> None:
        """Launch `work` on this stream."""
        work()

    def fence(self) -> CudaFence:
        """Record an event after everything that was launched until now, and return it as a fence."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return CudaFence(event)

    def follow(self, fence: Fence) -> None:
        """Let everything launched from now on begin after another stream's event. The host does not wait."""
        if isinstance(fence, CudaFence):
            torch.cuda.current_stream(self._device).wait_event(fence.event)


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = CudaStream(device)

    @contextmanager
    def own(self) -> Iterator[CudaStream]:
        """Make a stream for the calling thread. It is the thread's current stream until the end of the `with` block."""
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield CudaStream(self._device)
