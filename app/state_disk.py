"""Calls the disk that holds the server's own files, and stops waiting for it after a deadline. A thread inside a system
call cannot be stopped; its caller can."""

import errno
import logging
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar, cast

T = TypeVar("T")
State = Literal["used", "away", "full", "read_only", "failing"]
DEADLINE_S = 5.0  # the longest wait for one call, the same as for a read of KV
FIRST_PAUSE_S = 0.5  # before a disk that was given up is called again; doubled if it is given up again soon
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # a disk that was used for so long begins with the first pause again
END_S = 0.2  # longest wait for a thread to end
_PROBLEMS: dict[State, str] = {
    "away": "it does not answer",
    "full": "it is full",
    "read_only": "it cannot be written to",
    "failing": "it reports errors",
}
_NO_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
_BY_ERRNO: dict[int | None, State] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}
_BY_SQLITE: dict[int, State] = {  # the others are no fault of the disk
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_PERM: "read_only",
    sqlite3.SQLITE_IOERR: "failing",
    sqlite3.SQLITE_CANTOPEN: "failing",
}
log = logging.getLogger(__name__)
_here = threading.local()  # `job`: what a thread that calls a disk does now


class DiskAway(Exception):
    """The disk has not answered in time, is not called because it did not answer lately, or cannot be written to.
    is_under_way: the call was made and goes on, so that it may still do its work later."""

    is_under_way = False


class StateDisk:
    """A record of whether one disk answers, shared by all that call it, so that not every caller has to wait for a disk
    that hangs. When a call misses the deadline, all calls fail at once until the overdue ones have ended, and for a
    pause after that. Thread-safe."""

    def __init__(self, name: str = "the disk of the server's own files", *, deadline_s: float | None = None) -> None:
        """Set up. name: what the log calls the disk. deadline_s: how long callers wait for one call; None:
        DEADLINE_S."""
        self.failures = 0  # calls that were not made, or not waited for
        self.deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        self._name = name
        self._lock = threading.Lock()  # guards what follows
        self._num_overdue = 0
        self._used_s = time.monotonic()  # from when on it is used
        self._pause_s = FIRST_PAUSE_S
        self._refusal: State = "used"  # why it did not take the last write; "used": it did
        self._unused: set[str] = set()  # names of files that could not be opened

    @property
    def state(self) -> State:
        """The present use of the disk. "used": it is read and written. "away": neither, since it does not answer. Any
        other word: it cannot be written, and perhaps not read."""
        if self.is_away:
            return "away"
        return "failing" if self._refusal == "used" and self._unused else self._refusal

    @property
    def problem(self) -> str | None:
        """Why nothing new is stored on the disk, for people; None if it is stored."""
        names = sorted(self._unused)
        if names and self._refusal == "used" and not self.is_away:
            return f"{', '.join(names)} could not be opened: what is new is in memory until a restart"
        return _PROBLEMS.get(self.state)

    def refused(self, error: Exception) -> None:
        """Record that a write has failed. Errors that are not the disk's fault change nothing."""
        if isinstance(error, OSError):
            self._refusal = self._refusal if error.errno in _NO_FAULT else _BY_ERRNO.get(error.errno, "failing")
        else:
            self._refusal = _BY_SQLITE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, self._refusal)

    def took(self) -> None:
        """Record that a write has succeeded."""
        self._refusal = "used"

    def note_file(self, name: str, *, is_used: bool) -> None:
        """Record whether a file on the disk is used. If not, a database in memory takes its place until a restart."""
        with self._lock:
            self._unused = self._unused - {name} if is_used else self._unused | {name}

    @property
    def is_away(self) -> bool:
        """Whether the disk does not answer, so that calls fail at once."""
        return self._num_overdue > 0 or time.monotonic() < self._used_s

    def thread(self, name: str) -> "DiskThread":
        """Return a new thread that calls this disk."""
        return DiskThread(self, name)

    def require(self) -> None:
        """Raise DiskAway if the disk does not answer."""
        if self.is_away:
            self.failures += 1
            raise DiskAway(f"{self._name} does not answer")

    def give_up(self) -> None:
        """Record that a call has missed the deadline."""
        with self._lock:
            self.failures += 1
            self._num_overdue += 1
            is_first = self._num_overdue == 1
            if is_first:
                settled = time.monotonic() - self._used_s > SETTLED_S
                self._pause_s = FIRST_PAUSE_S if settled else min(2 * self._pause_s, LONGEST_PAUSE_S)
        if is_first:
            log.warning(
                "%s has not answered for %g s: until it answers, no conversation is kept there, or found",
                *(self._name, self.deadline_s),
            )

    def came_back(self, error: BaseException | None) -> None:
        """Record that a call has ended which had missed the deadline. error: what it has raised, if anything."""
        with self._lock:
            self._num_overdue -= 1
            is_last = self._num_overdue == 0
            if is_last:
                self._used_s = time.monotonic() + self._pause_s
        if error is not None:
            log.warning("an overdue call of %s has failed: %s", self._name, error)
        if is_last:
            log.warning("%s answers and is used", self._name)


def require_wanted() -> None:
    """Raise DiskAway if the caller of the present call has stopped waiting for it, so that nothing is written which
    that caller may write again."""
    job: _Job[Any] | None = getattr(_here, "job", None)
    if job is not None and job.abandoned:
        raise DiskAway("nobody waits for it any more")


@contextmanager
def long_call() -> Iterator[None]:
    """Mark a part of a call that may exceed the deadline although the disk answers, such as copying a whole file. The
    caller still stops waiting at the deadline, and later calls of this thread fail until the part has ended. But the
    disk does not count as away."""
    job: _Job[Any] | None = getattr(_here, "job", None)
    if job is not None:
        job.is_long = True
    try:
        yield
    finally:
        if job is not None:
            job.is_long = False


class _Job(Generic[T]):
    __slots__ = ("abandoned", "begun", "done", "error", "has_given_up", "is_long", "is_over", "result", "work")

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.done = threading.Lock()  # unlocked when the job is over; costs a fifth of an Event
        self.done.acquire()
        self.begun = self.is_over = self.abandoned = self.is_long = self.has_given_up = False
        self.result: T | None = None
        self.error: BaseException | None = None

    @property
    def hangs(self) -> bool:
        """Whether nobody waits for it any more, it should have ended, and it has not given the disk up yet."""
        return self.begun and self.abandoned and not (self.is_over or self.is_long or self.has_given_up)


class DiskThread:
    """A daemon thread that makes calls to one disk, one after the other. Any thread may call it. It is started by the
    first call, and ends with this object."""

    def __init__(self, disk: StateDisk, name: str) -> None:
        self.at_end: list[Callable[[], object]] = []  # calls that the thread makes when it ends, such as of what closes
        self._disk, self._name = disk, name
        self._lock = threading.Lock()  # guards the state of jobs, and the start
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()  # None ends the thread
        self._last: _Job[Any] | None = None  # the newest job, begun or not
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread, and return or raise what it does. Raises DiskAway at once while the disk is away.
        Also raises it when `work` has not ended within the deadline: `work` then goes on, and its result is lost."""
        if threading.current_thread() is self._thread:
            return work()  # a part of a call
        self._disk.require()
        if self._is_closed:
            raise DiskAway("it was closed")
        last = self._last
        if last is not None and last.is_long and last.abandoned:
            self._disk.failures += 1
            raise DiskAway("a call that takes long goes on")
        self._last = job = _Job(work)
        self._start()
        self._jobs.put(job)
        if not job.done.acquire(timeout=self._disk.deadline_s):
            with self._lock:
                if not job.is_over:
                    job.abandoned = True
                    # One that took long has not given the disk up. Where it hangs after that, it does now.
                    hung = job if job.begun else last
                    if hung is not None and hung.hangs:
                        hung.has_given_up = True
                        self._disk.give_up()
                    else:  # it may take long, or the one before it hangs and has given the disk up
                        self._disk.failures += 1
                    away = DiskAway(f"no answer for {self._disk.deadline_s:g} s")
                    away.is_under_way = job.begun
                    raise away
        if job.error is not None:
            raise job.error
        return cast(T, job.result)

    def close(self) -> None:
        """End the thread once it has made the calls that it was given, and wait for that, for END_S at most. Later
        calls raise DiskAway."""
        self._is_closed = True
        if self._thread is not None:
            _end(self._jobs, self._thread)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                arguments = (self._jobs, self._lock, self._disk, self.at_end)
                self._thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
                self._thread.start()
                weakref.finalize(self, _end, self._jobs, self._thread)


def _end(jobs: "SimpleQueue[_Job[Any] | None]", thread: threading.Thread) -> None:
    """End a DiskThread. Waits until it ends or hangs in `at_end`, which the end of the program would cut off."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(END_S)


def _serve(
    jobs: "SimpleQueue[_Job[Any] | None]", lock: threading.Lock, disk: StateDisk, at_end: list[Callable[[], object]]
) -> None:
    """Do the jobs of one DiskThread. A function, so that the thread does not keep that object alive."""
    while (job := jobs.get()) is not None:
        with lock:
            is_wanted = not job.abandoned
            job.begun = True
        if not is_wanted:
            continue
        _here.job = job
        try:
            job.result = job.work()
        except BaseException as error:
            job.error = error
        finally:
            _here.job = None
        with lock:
            job.is_over = True
        if job.has_given_up:
            disk.came_back(job.error)
        job.done.release()
        del job  # its values would otherwise live until the next job
    for work in at_end:
        with suppress(Exception):
            work()
