"""Implements a circuit breaker: a service that fails again and again is not called for a while, and then tried once."""

from typing import Literal

State = Literal["closed", "open", "half_open"]


class Breaker:
    """A circuit breaker that opens after a number of failures in a row. After a pause one call is let through: it
    closes the breaker again, or opens it for another pause. Single-threaded; `now` is a monotonic clock in seconds."""

    def __init__(self, *, failures: int, pause_s: float) -> None:
        self.failures = 0  # failures since the start
        self._most, self._pause_s = failures, pause_s
        self._in_a_row = 0
        self._closed_s = 0.0  # no call before that
        self._probe_s: float | None = None  # when the one call was let through; one that never ends counts for a pause

    def state(self, now: float) -> State:
        if self._in_a_row < self._most:
            return "closed"
        return "open" if now < self._closed_s else "half_open"

    def allows(self, now: float) -> bool:
        """Return whether a call may be made now. After the call, the caller has to call `succeeded` or `failed`, or
        neither if the call was cancelled."""
        state = self.state(now)
        if state != "half_open":
            return state == "closed"
        if self._probe_s is not None and now < self._probe_s + self._pause_s:
            return False
        self._probe_s = now
        return True

    def succeeded(self) -> None:
        self._in_a_row, self._probe_s = 0, None

    def failed(self, now: float) -> None:
        self.failures += 1
        self._in_a_row += 1
        self._closed_s, self._probe_s = now + self._pause_s, None
