"""Carries the reports of the transfer threads to the engine's thread."""

import os
import threading
import weakref
from collections import deque

from reprise.cache.moves import Event


class Events:
    """A queue of events from the transfer threads to the engine's thread. Thread-safe, but `bell` and `take` are for
    the engine's thread alone. `changed` guards the data that threads and engine share; a thread that changes any of it
    notifies it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.has_news = False
        """Whether `take` has something to return or to raise. May be read without the lock, and may be true although
        there is nothing."""
        self._events: deque[Event] = deque()
        self._awaited = False  # whether the engine's thread waits
        self._failure: BaseException | None = None
        self._bell: tuple[int, int] | None = None  # ends of a pipe: to be waited for, to be written to

    @property
    def bell(self) -> int:
        """A file descriptor that becomes readable when there is an event, for a loop that waits for other things
        too."""
        if self._bell is None:
            made = os.pipe()
            for end in made:
                os.set_blocking(end, False)
                weakref.finalize(self, os.close, end).atexit = False  # threads may ring until the process has gone
            with self.changed:
                self._bell = made
                if self.has_news:
                    self._ring()
        return self._bell[0]

    def tell(self, *events: Event) -> None:
        """Report events. The bytes that they report must be in place already."""
        with self.changed:
            self._events.extend(events)
            self._note_news()
            if self._awaited:  # else only threads that wait for loads would wake, and wait again
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report that a thread has failed."""
        with self.changed:
            self._failure = error
            self._note_news()
            self.changed.notify_all()

    def check(self) -> None:
        """Raise RuntimeError if a thread has failed."""
        if self._failure is not None:
            raise RuntimeError("a transfer thread has ended") from self._failure

    def take(self) -> list[Event]:
        """Return the events that no earlier call has returned. Raises RuntimeError if a thread has failed."""
        with self.changed:  # the bell rings if and only if there is news
            self.check()
            self._silence()
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

    def _note_news(self) -> None:
        """Make the file descriptor `bell` readable once for all events before the next `take`, so that the pipe never
        fills."""
        if not self.has_news:
            self.has_news = True
            self._ring()

    def _ring(self) -> None:
        if self._bell is not None:
            os.write(self._bell[1], b"\0")

    def _silence(self) -> None:
        if self._bell is not None and self.has_news:
            os.read(self._bell[0], 1)
