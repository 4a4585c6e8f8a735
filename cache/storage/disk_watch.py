"""Decides whether the disk is used. One thread takes it when it answers at the start, asks it when it was given up, and
takes it back."""

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from reprise.cache.storage.directory_lock import DirectoryLocked
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.io_threads import Beat

T = TypeVar("T")
FIRST_PAUSE_S = 0.5  # before the disk is asked again; doubled after every answer that does not come
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # a disk that was used for so long is asked as soon as at first when it is given up
CLOSE_S = 1.0  # longest wait of `close` for the thread
MAX_FAILURES = 3  # reads in a row in which the device reported an error, after which it is given up
_BY_HAND = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
log = logging.getLogger(__name__)


class _Closed(Exception):
    """The watch was closed during an attempt."""


class _State(Enum):
    UNTAKEN = "untaken"
    USED = "used"
    GIVEN_UP = "given up"
    CLOSED = "closed"


def is_mistake(error: BaseException) -> bool:
    """Return whether only a person can remove the cause of an error: another server's lock, a file in the directory's
    place, or missing rights."""
    return isinstance(error, DirectoryLocked) or (isinstance(error, OSError) and error.errno in _BY_HAND)


class DiskWatch(Generic[T]):
    """A watch on one disk. Thread-safe. Its thread is a daemon, and the only one that waits for a disk that is not
    used: while a call of its own hangs, nothing else is tried. The states of the disk:

    state       what the thread does                            next
    UNTAKEN     calls `take` until that does not raise           USED, CLOSED
    USED        waits                                            GIVEN_UP (`give_up`), CLOSED
    GIVEN_UP    calls `ask` until that does not raise            USED, CLOSED
    CLOSED      ends
    """

    def __init__(
        self,
        *,
        name: str,
        take: Callable[[Beat], T],
        ask: Callable[[Beat], None],
        release: Callable[[], None],
        switch: Callable[[str | None], None],
    ) -> None:
        """Set up. name: of the disk, for the log. take: takes the disk for the first time and returns what lies there.
        ask: returns if the disk answers. release: undoes `take`, for a watch that was closed meanwhile.
        switch(problem): called when the disk is not used any more, or is again (None); it must not block, nor call the
        watch."""
        self._name = name
        self._take, self._ask, self._release, self._switch = take, ask, release, switch
        self._changed = threading.Condition()  # guards what follows
        self._state = _State.UNTAKEN
        self._problem: str | None = "it was not opened yet"
        self._error: BaseException | None = None  # the error of the first attempt
        self._is_missed = False  # it was said that the disk is not used
        self._found: T | None = None
        self._failures = 0  # errors of the device since a read succeeded
        self._used_s = 0.0  # when it was taken last
        self._pause_s = FIRST_PAUSE_S
        self._tell: Callable[[str | None, T | None], None] | None = None
        self._untold: list[tuple[str | None, T | None]] = []
        self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)

    @property
    def problem(self) -> str | None:
        """The reason why the disk is not used, as a text for people; None while it is used."""
        return self._problem

    def begin(self, patience_s: float) -> T | None:
        """Start the thread, and wait at most `patience_s` seconds for its first attempt to take the disk. Returns what
        lies on the disk if that has succeeded. Otherwise returns None, and the listener is told when the disk is taken
        later. Raises the error of the first attempt if only a person can remove its cause (`is_mistake`)."""
        with self._changed:
            self._switch(self._problem)
            self._thread.start()
            self._changed.wait_for(
                lambda: self._state is not _State.UNTAKEN or self._error is not None, timeout=patience_s
            )
            if self._state is _State.USED:
                found, self._found = self._found, None
                self._untold.clear()
                return found
            error = self._error
            if error is not None and is_mistake(error):
                self._state = _State.CLOSED
                self._changed.notify_all()
                raise error
            if error is None:
                self._problem = f"it could not be opened within {patience_s:g} s"
                self._switch(self._problem)
            self._is_missed = True
            self._untold.clear()
        log.warning("%s is not used: %s; it is taken when it answers", self._name, self._problem)
        return None

    def listen(self, tell: Callable[[str | None, T | None], None]) -> None:
        """Call `tell` at every change, from any thread: with (problem, None) when the disk is given up, or is not used
        for another reason than before, (None, what lies there) when it is taken for the first time, and (None, None)
        when it is used again."""
        with self._changed:
            self._tell = tell
            for news in self._untold:
                tell(*news)
            self._untold.clear()

    def give_up(self, problem: str) -> None:
        """Stop using the disk until it answers again. Does nothing if it is not in use. problem: the reason, as a text
        for people."""
        with self._changed:
            if self._state is not _State.USED:
                return
            self._state, self._problem, self._failures = _State.GIVEN_UP, problem, 0
            self._is_missed = True
            if time.monotonic() - self._used_s > SETTLED_S:
                self._pause_s = FIRST_PAUSE_S
            self._switch(problem)
            self._say(problem, None)
            self._changed.notify_all()
        log.warning("%s is given up: %s; it is used again when it answers", self._name, problem)

    def note_read(self, problem: str | None) -> None:
        """Record how a read has ended. problem: the device's error; None if it has answered. After MAX_FAILURES errors
        in a row, the disk is given up."""
        if problem is None:
            self._failures = 0  # a race with another thread's error delays the giving up by a read
            return
        with self._changed:
            self._failures += 1
            is_broken = self._failures >= MAX_FAILURES
        if is_broken:
            self.give_up(f"{MAX_FAILURES} reads in a row have failed, the last one with: {problem}")

    def close(self) -> bool:
        """Stop using the disk for good, and let the thread end. Returns whether it has ended within CLOSE_S seconds; it
        cannot while a call of it hangs."""
        with self._changed:
            self._state = _State.CLOSED
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (state := self._next()) is not _State.CLOSED:
            found: T | None = None
            try:
                if state is _State.UNTAKEN:
                    found = self._take(self._beat)
                else:
                    self._ask(self._beat)
            except _Closed:
                self._release_quietly()
                return
            except (OSError, sqlite3.Error, DirectoryLocked, BlockMissing, MemoryError, UnicodeError) as error:
                self._failed(error)
            except BaseException as error:
                self._failed(error)
                log.exception("what watches %s has failed", self._name)
            else:
                self._succeeded(found)

    def _next(self) -> _State:
        """Wait until there is something to do. Returns the state."""
        with self._changed:
            while self._state is _State.USED:
                self._changed.wait()
            is_first_attempt = self._state is _State.UNTAKEN and self._error is None
            if not is_first_attempt:
                self._changed.wait_for(lambda: self._state is _State.CLOSED, timeout=self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return self._state

    def _beat(self) -> None:
        if self._state is _State.CLOSED:
            raise _Closed

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            if self._state is _State.CLOSED:
                return
            problem = _words(error)
            is_new = problem != self._problem
            self._problem = problem
            self._switch(problem)
            self._error = self._error or error
            if is_new and self._is_missed:
                self._say(problem, None)
            self._changed.notify_all()

    def _succeeded(self, found: T | None) -> None:
        with self._changed:
            if self._state is _State.CLOSED:
                self._release_quietly()
                return
            self._state, self._problem, self._used_s = _State.USED, None, time.monotonic()
            self._failures, was_missed, self._is_missed = 0, self._is_missed, False
            self._found = None if was_missed else found  # for `begin`, which still waits
            self._switch(None)
            self._say(None, found)
            self._changed.notify_all()
        if was_missed:
            log.warning("%s answers and is used", self._name)

    def _say(self, problem: str | None, found: T | None) -> None:
        if self._tell is None:
            self._untold.append((problem, found))
        else:
            self._tell(problem, found)

    def _release_quietly(self) -> None:
        try:
            self._release()
        except (OSError, sqlite3.Error):
            log.info("%s was not released", self._name, exc_info=True)


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__
