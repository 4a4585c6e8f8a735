"""Brings layers' weights from DRAM to HBM before the layers that need them, in the order in which those run.

A few buffers in HBM are used in turn. A thread of its own fills the next one while the layers before it compute. The
thread that runs a layer waits for its weights with `enter` and gives their buffer back with `leave`. The last layer is
followed by the first, so a step finds its first layers in HBM.

Sources: FlexGen (arXiv 2303.06865) and HybridServe (arXiv 2501.01792), which also move weights while other layers
compute.
"""

import threading
import time
from collections.abc import Callable, Mapping

CopyWeights = Callable[[int, int], None]
"""Copies a layer's weights into a buffer and returns when they are in it: (layer, buffer). Called by the stream's
thread."""


class WeightsLost(RuntimeError):
    """Weights cannot be brought to HBM any more; nothing can be computed."""


class WeightStream:
    """The buffers of HBM and the thread that fills them. `enter` and `leave` are for one thread at a time: the one that
    runs the model."""

    def __init__(self, *, sizes: Mapping[int, int], num_buffers: int, copy: CopyWeights) -> None:
        """Start the thread. sizes: layer -> bytes of its weights, in the order in which layers run. copy: fills a
        buffer; called at once, and then whenever a buffer is free. Raises ValueError for fewer than two buffers."""
        if num_buffers < 2:
            raise ValueError("one buffer is computed with, so another must be filled meanwhile")
        self._order, self._sizes, self._copy = list(sizes), dict(sizes), copy
        self._changed = threading.Condition()
        self._free = list(range(num_buffers))[::-1]
        self._held: dict[int, int] = {}  # layer whose weights are in HBM -> buffer, in order of arrival
        self._entered: int | None = None  # layer that is being computed
        self._next = 0  # place in the order, of the layer to copy next
        self._copying: int | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self.copied_bytes = 0
        self.waited_s = 0.0  # time that layers have waited for weights
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def enter(self, layer: int) -> int:
        """Wait until a layer's weights are in HBM. Returns the number of their buffer, which is not refilled until
        `leave`. Raises WeightsLost."""
        with self._changed:
            if self._is_ahead(layer):
                self._go_to(layer)
            if layer not in self._held:
                started = time.monotonic()
                self._changed.wait_for(lambda: layer in self._held or self._failure is not None or self._is_closed)
                self.waited_s += time.monotonic() - started
            if layer not in self._held:
                raise WeightsLost("weights could not be copied to HBM") from self._failure
            self._entered = layer
            return self._held[layer]

    def leave(self, layer: int) -> None:
        """Give a layer's buffer back. A layer that was not entered is ignored."""
        with self._changed:
            if self._entered == layer:
                self._entered = None
                self._drop(layer)

    def close(self) -> None:
        """End the thread, after the copy that it is making."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _is_ahead(self, layer: int) -> bool:
        """Return whether the stream's order is out of step with the computation: it would copy weights of other layers,
        which are not needed now, before this layer's. That happens after a step that broke off, or if layers run in
        another order."""
        if layer in self._held:
            return next(iter(self._held)) != layer
        due = self._copying if self._copying is not None else self._order[self._next]
        return bool(self._held) or due != layer

    def _go_to(self, layer: int) -> None:
        """Drop the weights that the stream would bring before those of `layer`."""
        for other in list(self._held):
            if other == layer:
                return
            self._drop(other)
        if self._copying != layer:
            self._next = self._order.index(layer)
            self._changed.notify_all()

    def _drop(self, layer: int) -> None:
        self._free.append(self._held.pop(layer))
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._can_copy)
                if self._is_closed:
                    return
                buffer, layer = self._free.pop(), self._order[self._next]
                self._next = (self._next + 1) % len(self._order)
                self._copying = layer
            try:
                self._copy(layer, buffer)
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._copying = None
                self._held[layer] = buffer
                self.copied_bytes += self._sizes[layer]
                self._changed.notify_all()

    @property
    def _can_copy(self) -> bool:
        return bool(self._free) and self._order[self._next] not in self._held
