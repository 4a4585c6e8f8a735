"""Orders what the device does for the step and for the transfer threads: streams, and fences between them.

When a forward pass or a copy returns, it was launched, and the host goes on while the device works. The host decides
who gets which pages, so whoever gets some has its stream follow a fence of the stream that used them before. Nothing
else orders pages between streams.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Fence(Protocol):
    """Marks what was launched on a stream until then. May be used by any thread."""

    @property
    def is_done(self) -> bool:
        """Whether the device has done all of it. Never waits."""
        ...

    def wait(self) -> None:
        """Return when the device has done all of it. Raises torch.AcceleratorError where that has failed."""
        ...

    def seconds_since(self, earlier: "Fence") -> float:
        """Return the time between the moments at which two fences of one stream were done, as they both are now."""
        ...


class DeviceStream(Protocol):
    """Does what is launched on it in order, and beside other streams. Belongs to one thread."""

    def launch(self, work: Callable[[], object]) -> None:
        """Have the device do something. It may not have begun on return, and what it reads has to stay as it is until a
        fence behind it is done. On the host `work` runs once, at the latest while such a fence is waited for."""
        ...

    def fence(self) -> Fence:
        """Return a fence behind everything that was launched until now."""
        ...

    def follow(self, fence: Fence) -> None:
        """Begin nothing that is launched from now on before another stream's fence is done. Does not wait."""
        ...


class DeviceStreams(Protocol):
    """The streams of one device."""

    @property
    def compute(self) -> DeviceStream:
        """The one that steps are computed on. The engine's thread."""
        ...

    def own(self) -> AbstractContextManager[DeviceStream]:
        """Make a stream for the calling thread, which is its current one meanwhile."""
        ...


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the streams that order work on a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class HostFence:
    """Processors are done with everything when a call returns."""

    is_done = True

    def __init__(self) -> None:
        self._made_s = time.perf_counter()

    def wait(self) -> None:
        """See Fence."""

    def seconds_since(self, earlier: Fence) -> float:
        """See Fence."""
        assert isinstance(earlier, HostFence)
        return self._made_s - earlier._made_s


class HostStream:
    """Does everything at once."""

    def launch(self, work: Callable[[], object]) -> None:
        """See DeviceStream."""
        work()

    def fence(self) -> HostFence:
        """See DeviceStream."""
        return HostFence()

    def follow(self, fence: Fence) -> None:
        """See DeviceStream."""


class HostStreams:
    """Stands in where there is no device: threads do everything themselves."""

    def __init__(self) -> None:
        self.compute = HostStream()

    def own(self) -> AbstractContextManager[HostStream]:
        """See DeviceStreams."""
        return nullcontext(HostStream())


class CudaFence:
    """An event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def is_done(self) -> bool:
        """See Fence."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Fence."""
        self.event.synchronize()

    def seconds_since(self, earlier: Fence) -> float:
        """See Fence."""
        assert isinstance(earlier, CudaFence)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """The current stream of the thread that it belongs to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(self, work: Callable[[], object]) -> None:
        """See DeviceStream."""
        work()

    def fence(self) -> CudaFence:
        """See DeviceStream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return CudaFence(event)

    def follow(self, fence: Fence) -> None:
        """See DeviceStream."""
        if isinstance(fence, CudaFence):
            torch.cuda.current_stream(self._device).wait_event(fence.event)


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = CudaStream(device)

    @contextmanager
    def own(self) -> Iterator[CudaStream]:
        """See DeviceStreams."""
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield CudaStream(self._device)
