"""Runs blocking calls with a deadline. A thread inside a system call cannot be stopped; its caller can only stop
waiting."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from reprise.cache.storage.thread_priority import lower_priority

T = TypeVar("T")
MAX_WAITING = 256
_REFUSING_S = 0.2  # longest wait of `close` for threads while calls are refused: some may never come back
log = logging.getLogger(__name__)

Beat = Callable[[], None]
"""Called between the steps of a longer operation, because the deadline applies to one step. Raises IoDeadline if the
caller has stopped waiting."""


class IoDeadline(Exception):
    """The work did not finish in time, or no thread was free for it. began: whether it may still be running."""

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


class _Job(Generic[T]):
    __slots__ = ("abandoned", "begun", "done", "error", "is_over", "late", "result", "until", "withdrawn", "work")

    def __init__(self, work: Callable[[Beat], T], late: Callable[[], None], until: float) -> None:
        self.work, self.late, self.until = work, late, until
        self.done = threading.Lock()  # unlocked when the job is over; costs a fifth of an Event
        self.done.acquire()
        self.begun = self.withdrawn = self.abandoned = self.is_over = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def end(self) -> None:
        self.is_over = True
        self.done.release()


class IoThreads:
    """A pool of a fixed number of daemon threads. A thread whose work is overdue counts as lost until the work ends.
    When all threads are lost, every call fails at once, so a device that hangs costs its callers no time and no memory.
    `refuse` makes calls fail at once before that.
    """

    def __init__(
        self, *, name: str, num_threads: int, deadline_s: float, lower_by: int, on_late: Callable[[str], None]
    ) -> None:
        """Start the threads. lower_by: how much lower their priority is, in steps of niceness (`lower_priority`).
        on_late: called by the caller of work that has become overdue, with words for people."""
        self._lower_by = lower_by
        self._on_late = on_late
        self._refusal: str | None = None  # why no call is made now
        self._deadline_s = deadline_s
        self._num_threads = num_threads
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()  # guards the fields here and the state of jobs
        self._num_waiting = 0
        self._jobs: SimpleQueue[_Job[object] | None] = SimpleQueue()  # None ends the thread that gets it
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> int:
        """The number of threads that are busy with work whose caller has stopped waiting."""
        with self._lock:
            return self._lost

    def call(self, work: Callable[[Beat], T], late: Callable[[], None]) -> T:
        """Run `work` in one of the threads, and return or raise what it does. Raises IoDeadline if no thread is free in
        time or a step of the work takes longer than the deadline; the work begins a new step when it calls the Beat
        that it is given.

        After an IoDeadline with `began`, `late` is called in the I/O thread once the work has ended, however it ended.
        Until then the work may use its descriptors and buffers, so `late` must release them, not the caller.
        """
        job = _Job(work, late, time.monotonic() + self._deadline_s)
        with self._lock:
            if self._closed:
                raise IoDeadline("closed", began=False)
            if self._refusal is not None:
                raise IoDeadline(self._refusal, began=False)
            if self._lost >= self._num_threads or self._num_waiting >= MAX_WAITING:
                raise IoDeadline(f"{self._lost} of {self._num_threads} I/O threads hang", began=False)
            self._num_waiting += 1
            self._jobs.put(job)  # type: ignore[arg-type]
        while not job.done.acquire(timeout=max(0.0, job.until - time.monotonic())):
            with self._lock:
                if job.is_over or time.monotonic() < job.until:
                    continue
                if not job.begun:
                    job.withdrawn = True
                    self._num_waiting -= 1
                    raise IoDeadline(f"no I/O thread was free for {self._deadline_s} s", began=False)
                job.abandoned = True
                self._lost += 1
            problem = f"no answer for {self._deadline_s:g} s"
            self._on_late(problem)
            raise IoDeadline(problem, began=True)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def refuse(self, why: str | None) -> None:
        """Make all calls fail at once from now on, those that wait for a thread included. why: for their errors; None:
        run calls again."""
        with self._lock:
            self._refusal = why
            if why is not None and not self._closed:
                self._fail_waiting(why)

    def close(self) -> bool:
        """Fail the calls that wait for a thread, and wait for running ones up to their deadlines, but not for any that
        are overdue while calls are refused. Returns whether all threads have ended."""
        with self._lock:
            self._closed = True
            self._fail_waiting("closed")
            for _ in self._threads:
                self._jobs.put(None)
            until = time.monotonic() + (self._deadline_s if self._refusal is None else _REFUSING_S)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _fail_waiting(self, why: str) -> None:
        """Fail the calls for which no thread was free yet. Called with the lock held."""
        with contextlib.suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None and self._begin(job):
                    job.error = IoDeadline(why, began=False)
                    job.end()

    def _run(self) -> None:
        lower_priority(self._lower_by)
        while (job := self._jobs.get()) is not None:
            with self._lock:
                is_wanted = self._begin(job)
            if is_wanted:
                self._do(job)
            del job  # its buffers would otherwise live until the next job

    def _begin(self, job: _Job[object]) -> bool:
        """Mark the job as begun; returns False if its caller has stopped waiting. Called with the lock held."""
        if job.withdrawn:
            return False
        self._num_waiting -= 1
        job.begun = True
        job.until = time.monotonic() + self._deadline_s
        return True

    def _do(self, job: _Job[object]) -> None:
        def beat() -> None:
            if job.abandoned:
                raise IoDeadline("nobody waits any more", began=True)
            job.until = time.monotonic() + self._deadline_s

        try:
            job.result = job.work(beat)
        except BaseException as error:
            job.error = error
        with self._lock:
            if not job.abandoned:
                job.end()
                return
        try:
            job.late()
        except Exception:
            log.exception("cleaning up after an overdue operation failed")
        with self._lock:
            self._lost -= 1
