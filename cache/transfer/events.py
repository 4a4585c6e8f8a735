"""What the transfer threads have done, on its way to the engine's thread."""

import threading
from collections import deque

from cache.moves import Event


class Events:
    """Thread-safe. `changed` guards what threads and engine share; who moves something on notifies it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._awaited = False  # the engine's thread waits
        self._failure: BaseException | None = None

    def tell(self, *events: Event) -> None:
        """These have ended: their bytes are where they belong."""
        with self.changed:
            self._events.extend(events)
            if self._awaited:  # else only threads that wait for loads would wake, and wait again
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A thread has ended that should not have."""
        with self.changed:
            self._failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raises what broke a thread, if one broke."""
        if self._failure is not None:
            raise RuntimeError("a transfer thread has ended") from self._failure

    def take(self) -> list[Event]:
        """What has ended since the last call. Raises like `check`."""
        self.check()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float) -> None:
        """Returns when something has ended, or after the timeout."""
        with self.changed:
            if not self._events:
                self._awaited = True
                self.changed.wait(timeout_s)
                self._awaited = False
