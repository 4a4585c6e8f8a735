"""Caps bytes per second, in order to imitate a slower link."""

import threading
from collections.abc import Callable

CREDIT_S = 0.02  # how much an idle link may save up: enough to make up for a late wake-up, too little for a burst


class Throttle:
    """A token bucket for one direction of one link. All threads share it and are served in order of asking.

    A transfer is booked before it starts and waited for after it is done, so it takes the longer of the time that the
    cap demands and the time that the device takes. Rate 0: no cap.
    """

    def __init__(self, *, bytes_per_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        if bytes_per_s < 0:
            raise ValueError(f"a cap of {bytes_per_s} bytes per second")
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")  # time at which all booked transfers have passed the link

    @property
    def is_capped(self) -> bool:
        return self._bytes_per_s > 0

    def book(self, num_bytes: int) -> float:
        """Book a transfer. Returns the time, on the injected clock, at which it will have passed the link; pass it to
        `wait`."""
        now = self._clock()
        if self._bytes_per_s == 0:
            return now
        with self._lock:
            self._free_at = max(self._free_at, now - CREDIT_S) + num_bytes / self._bytes_per_s
            return self._free_at

    def wait(self, until: float) -> None:
        """Sleep until the time `until`, unless it has passed."""
        left = until - self._clock()
        if left > 0:
            self._sleep(left)
