"""Keeps Python's cyclic garbage collector out of the steps."""

import gc

_NEVER = 1 << 30
_EVERY_S = 600.0


class Collector:
    """Prevents full garbage collections between steps. A full collection would walk the whole cache: with 20,000
    sessions of eight blocks it stopped every stream for more than a second. Objects that the cache drops have no
    cycles, so reference counting frees them, and collections of the young generations catch nearly all else. The rest
    is collected while nothing runs; objects found alive then are not walked again. Used by the engine's loop."""

    def __init__(self) -> None:
        self._last_s = float("-inf")
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        gc.freeze()

    def idle(self, now: float) -> None:
        """Collect garbage if the last collection is long enough ago. Call it only while nothing runs."""
        if now - self._last_s >= _EVERY_S:
            self._last_s = now
            gc.collect()
            gc.freeze()
