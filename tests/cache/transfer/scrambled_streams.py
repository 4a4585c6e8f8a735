"""A device that does what its streams were given as late, and in as strange an order, as the fences between them let
it."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from reprise.cache.transfer.device_streams import Fence


class ScrambledFence:
    def __init__(self, device: "ScrambledStreams") -> None:
        self.is_done = False
        self._device = device

    def wait(self) -> None:
        while not self.is_done:
            self._device.go_on()

    def seconds_since(self, earlier: Fence) -> float:
        return 0.0


class ScrambledStream:
    def __init__(self, device: "ScrambledStreams") -> None:
        self.waiting: deque[Callable[[], object] | ScrambledFence] = deque()
        """Work, and fences to be followed."""
        self._device = device

    def launch(self, work: Callable[[], object]) -> None:
        self.waiting.append(work)

    def fence(self) -> ScrambledFence:
        fence = ScrambledFence(self._device)
        self.waiting.append(lambda: setattr(fence, "is_done", True))
        return fence

    def follow(self, fence: Fence) -> None:
        assert isinstance(fence, ScrambledFence)
        if self._device.obeys:
            self.waiting.append(fence)

    @property
    def can_go_on(self) -> bool:
        head = self.waiting[0] if self.waiting else None
        return head is not None and (not isinstance(head, ScrambledFence) or head.is_done)

    def go_on(self) -> None:
        """Do what is next."""
        head = self.waiting.popleft()
        if not isinstance(head, ScrambledFence):
            head()


class ScrambledStreams:
    """Implements DeviceStreams. Whoever waits for a fence has the device and the other threads go on meanwhile."""

    def __init__(self, rng: random.Random, *, obeys: bool = True) -> None:
        """obeys: whether streams follow fences at all."""
        self.obeys = obeys
        self.compute = ScrambledStream(self)
        self.others: Callable[[], bool] = lambda: False
        """Has another thread do something; returns whether one did."""
        self._rng = rng
        self._streams = [self.compute]

    def own(self) -> AbstractContextManager[ScrambledStream]:
        stream = ScrambledStream(self)
        self._streams.append(stream)
        return nullcontext(stream)

    def go_on(self) -> None:
        """Have a thread or a stream do something, whichever comes first this time."""
        if self._rng.random() < 0.5 and self.others():
            return
        able = [stream for stream in self._streams if stream.can_go_on]
        if able:
            self._rng.choice(able).go_on()
        else:
            assert self.others(), "nothing can go on"
