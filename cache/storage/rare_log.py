"""Limits warnings about a device that fails again and again: the first of a kind at once, later ones rarely, with a
count."""

import logging
import threading
import time

EVERY_S = 10.0
log = logging.getLogger(__name__)


class RareLog:
    """A log that writes each kind of warning at most once per interval. Thread-safe."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        # kind -> time of the last message, number of messages left out since
        self._kinds: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str, *values: object) -> None:
        """Log a warning, or only count it if one of the same kind was logged lately. kind: a name, of a small fixed
        set. message, values: passed to the logger."""
        now = time.monotonic()
        with self._lock:
            said_s, count = self._kinds.get(kind, (float("-inf"), 0))
            if now - said_s < self._every_s:
                self._kinds[kind] = (said_s, count + 1)
                return
            self._kinds[kind] = (now, 0)
        log.warning(f"{message} (and {count} like it before)" if count else message, *values)
