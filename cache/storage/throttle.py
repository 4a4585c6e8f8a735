"""A cap on bytes per second that stands in for a slower link."""

import threading
from collections.abc import Callable

CREDIT_S = 0.02  # what an idle link may save up: a sleep that came back late is caught up, a burst is not let through


class Throttle:
    """A token bucket for one direction of one link, shared by all threads that use it, served in order of asking.

    A transfer is booked before it starts and waited for after it is done, so the link takes the longer of the two:
    what the cap demands or what the device takes. Rate 0 is no cap.
    """

    def __init__(self, *, bytes_per_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        if bytes_per_s < 0:
            raise ValueError(f"a cap of {bytes_per_s} bytes per second")
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")  # when all that was booked has passed the link

    @property
    def is_capped(self) -> bool:
        return self._bytes_per_s > 0

    def book(self, num_bytes: int) -> float:
        """When this transfer will have passed the link, on the injected clock; give it to `wait`."""
        now = self._clock()
        if self._bytes_per_s == 0:
            return now
        with self._lock:
            self._free_at = max(self._free_at, now - CREDIT_S) + num_bytes / self._bytes_per_s
            return self._free_at

    def wait(self, until: float) -> None:
        """Sleep until then, if it has not passed."""
        left = until - self._clock()
        if left > 0:
            self._sleep(left)
