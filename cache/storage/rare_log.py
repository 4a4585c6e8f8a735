"""Warnings of a device that fails again and again: the first of a kind at once, then one in a while with a count."""

import logging
import threading
import time

EVERY_S = 10.0
log = logging.getLogger(__name__)


class RareLog:
    """Thread-safe."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> when it was said last, how often it was not said since

    def warn(self, kind: str, message: str, *values: object) -> None:
        """`kind` is one of a few. `message` with `values` as for a logger."""
        now = time.monotonic()
        with self._lock:
            said_s, count = self._kinds.get(kind, (float("-inf"), 0))
            if now - said_s < self._every_s:
                self._kinds[kind] = (said_s, count + 1)
                return
            self._kinds[kind] = (now, 0)
        log.warning(f"{message} (and {count} like it before)" if count else message, *values)
