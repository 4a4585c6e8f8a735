"""Carries what the transfer threads report to the engine's thread."""

import threading
from collections import deque

from cache.moves import Event


class Events:
    """Queues events. Thread-safe. `changed` guards what threads and engine share; whoever changes that notifies it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.has_news = False
        """Whether `take` has something to return or to raise. May be read without the lock, and true for nothing."""
        self._events: deque[Event] = deque()
        self._awaited = False  # whether the engine's thread waits
        self._failure: BaseException | None = None

    def tell(self, *events: Event) -> None:
        """Report events; their bytes are where they belong."""
        with self.changed:
            self._events.extend(events)
            self.has_news = True
            if self._awaited:  # else only threads that wait for loads would wake, and wait again
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report that a thread has broken."""
        with self.changed:
            self._failure = error
            self.has_news = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise RuntimeError if a thread has broken."""
        if self._failure is not None:
            raise RuntimeError("a transfer thread has ended") from self._failure

    def take(self) -> list[Event]:
        """Return the events since the last call. Raises like `check`."""
        self.check()
        self.has_news = False  # before they are taken: one that comes meanwhile sets it again
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an event, or until the timeout."""
        with self.changed:
            if not self._events:
                self._awaited = True
                self.changed.wait(timeout_s)
                self._awaited = False
