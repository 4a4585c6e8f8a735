"""The times of one step."""

import time


class StepClock:
    """Begins when a step is called. The caller's `now` is on a clock of its own, monotonic and in seconds, which need
    not be this machine's: the step goes on with it by what has passed since."""

    def __init__(self, now: float) -> None:
        self.called = now
        self._called_s = self._computing_s = time.monotonic()

    def begin_computing(self) -> None:
        """What is decided before does not count as the step's seconds."""
        self._computing_s = time.monotonic()

    def now(self) -> float:
        """On the caller's clock."""
        return self.called + (time.monotonic() - self._called_s)

    def computing_s(self) -> float:
        """Since the batch began to be computed."""
        return time.monotonic() - self._computing_s
