"""Keeps Python's cyclic garbage collector out of the steps."""

import gc

_NEVER = 1 << 30
_EVERY_S = 600.0


class Collector:
    """Lets no full collection begin by itself. One would walk all that the cache knows: with 20,000 sessions of eight
    blocks it stopped every stream for more than a second. What the cache forgets is freed by its reference counts, and
    the young generations catch nearly all else. The rest is collected while nothing runs; what is found alive then is
    not walked again."""

    def __init__(self) -> None:
        self._last_s = float("-inf")
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        gc.freeze()

    def idle(self, now: float) -> None:
        """Collect, if it is time to. Call it while nothing runs."""
        if now - self._last_s >= _EVERY_S:
            self._last_s = now
            gc.collect()
            gc.freeze()
