"""Blocking calls with a deadline. A thread inside a system call cannot be stopped, only no longer waited for."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from cache.tiers.priority import lower_priority

T = TypeVar("T")
MAX_WAITING = 256
log = logging.getLogger(__name__)

Beat = Callable[[], None]
"""Work of several steps calls it between them: the deadline is of one step. Raises IoDeadline when nobody waits."""


class IoDeadline(Exception):
    """The work did not come back in time, or no thread was there to do it. `began`: it may still be running."""

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


class _Job(Generic[T]):
    __slots__ = ("abandoned", "begun", "done", "error", "late", "result", "until", "work")

    def __init__(self, work: Callable[[Beat], T], late: Callable[[], None], until: float) -> None:
        self.work, self.late, self.until = work, late, until
        self.done = threading.Event()
        self.begun = self.abandoned = False
        self.result: T | None = None
        self.error: BaseException | None = None


class IoThreads:
    """A fixed number of daemon threads. One whose work is overdue counts as lost until it comes back; when all are lost
    every call fails at once, so a device that hangs costs neither callers nor memory."""

    def __init__(self, *, name: str, num_threads: int, deadline_s: float, lower_by: int) -> None:
        """lower_by: see `lower_priority`."""
        self._lower_by = lower_by
        self._deadline_s = deadline_s
        self._num_threads = num_threads
        self._lost = 0
        self._closed = False
        self._wake = threading.Condition()
        self._waiting: deque[_Job[object]] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> int:
        """Threads inside work that nobody waits for any more."""
        with self._wake:
            return self._lost

    def call(self, work: Callable[[Beat], T], late: Callable[[], None]) -> T:
        """What `work` returns or raises, or IoDeadline when one of its steps takes longer than the deadline.

        After an IoDeadline that says `began`, `late` is called in the I/O thread when the work has ended after all,
        however it ended. So whoever gets IoDeadline hands over what the work uses (descriptors, buffers) to `late`.
        """
        job = _Job(work, late, time.monotonic() + self._deadline_s)
        with self._wake:
            if self._closed:
                raise IoDeadline("closed", began=False)
            if self._lost >= self._num_threads or len(self._waiting) >= MAX_WAITING:
                raise IoDeadline(f"{self._lost} of {self._num_threads} I/O threads hang", began=False)
            self._waiting.append(job)  # type: ignore[arg-type]
            self._wake.notify()
        while not job.done.wait(job.until - time.monotonic()):
            with self._wake:
                if job.done.is_set() or time.monotonic() < job.until:
                    continue
                if not job.begun:
                    self._waiting.remove(job)  # type: ignore[arg-type]
                    raise IoDeadline(f"no I/O thread was free for {self._deadline_s} s", began=False)
                job.abandoned = True
                self._lost += 1
                raise IoDeadline(f"no answer for {self._deadline_s} s", began=True)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def close(self) -> bool:
        """Calls that wait for a thread fail; running ones are given the deadline. Whether all have ended."""
        with self._wake:
            self._closed = True
            for job in self._waiting:
                job.error = IoDeadline("closed", began=False)
                job.done.set()
            self._waiting.clear()
            self._wake.notify_all()
        until = time.monotonic() + self._deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        lower_priority(self._lower_by)
        while True:
            with self._wake:
                while not self._waiting:
                    if self._closed:
                        return
                    self._wake.wait()
                job = self._waiting.popleft()
                job.begun = True
                job.until = time.monotonic() + self._deadline_s
            self._do(job)
            del job  # or its buffers would live until the next one comes

    def _do(self, job: _Job[object]) -> None:
        def beat() -> None:
            if job.abandoned:
                raise IoDeadline("nobody waits any more", began=True)
            job.until = time.monotonic() + self._deadline_s

        try:
            job.result = job.work(beat)
        except BaseException as error:
            job.error = error
        with self._wake:
            if not job.abandoned:
                job.done.set()
                return
        try:
            job.late()
        except Exception:
            log.exception("cleaning up after an overdue operation failed")
        with self._wake:
            self._lost -= 1
