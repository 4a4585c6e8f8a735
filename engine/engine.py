"""Runs requests: takes them in and returns the tokens of their answers."""

import logging
import time
from collections.abc import Callable

from reprise.cache.manager import CacheManager
from reprise.cache.storage.first_touch import FirstTouch
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.messages import Adopt, Head, ModelInfo, Output, SessionReply, SessionRequest, Stats, Submit
from reprise.engine.progress import PromptProgress
from reprise.engine.requests import KnownRequests
from reprise.engine.sessions import SessionDirectory
from reprise.engine.step.batch_step import BatchStep
from reprise.kernels.device_errors import is_sticky

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 8.0  # time for what was computed to reach the disk


class Engine:
    """The engine that `reprise.engine.process.loop` drives; `StepEngine` there explains its methods. Only that loop's
    thread calls it. `now` is a monotonic clock in seconds.

    Whatever fails in a step, everything that was committed before it stays right. A device that fails does so for good,
    and the engine ends (`is_fatal`).
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        cache: CacheManager,
        transfer: Transfer,
        requests: KnownRequests,
        step: BatchStep,
        sessions: SessionDirectory,
        first_touch: FirstTouch,
        progress: PromptProgress,
        stats: Callable[[], Stats],
    ) -> None:
        self.model = model
        self._cache, self._transfer, self._first_touch = cache, transfer, first_touch
        self._requests, self._step, self._sessions = requests, step, sessions
        self.progress = progress.take
        """Returns outputs that tell how far prompts are read; see `PromptProgress.take`."""
        self.stats = stats
        """Returns the current counts of all parts of the engine."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def accept(self, request: Submit, now: float) -> list[Output]:
        """Queue the choices of a request. Returns error outputs for those that cannot be taken."""
        return self._requests.accept(request, now)

    def abort(self, request_id: str) -> None:
        """End a request because its client is gone. What it has computed stays cached. An unknown id is ignored."""
        self._requests.abort(request_id)

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """End a choice after `keep_tokens` tokens of its answer, because the app has found a stop string there."""
        self._requests.finish(request_id, choice, keep_tokens)

    def finish_all(self, now: float) -> list[Output]:
        """End every request with finish_reason `length`."""
        return self._requests.finish_all(now)

    def fail_all(self, message: str) -> list[Output]:
        """End every request with an error. Nothing of the failed step is kept, because half of it may have been
        written."""
        outputs = self._requests.fail_all(message)
        self._step.fail()
        return outputs

    @staticmethod
    def is_fatal(error: Exception) -> bool:
        """Return whether an error means that a device has failed for good (`reprise.kernels.device_errors`). A lack of
        memory is not fatal."""
        return is_sticky(error)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._requests.choices or self._requests.held)

    @property
    def bell(self) -> int:
        """A file descriptor that becomes readable when a transfer has ended and `poll` should be called."""
        return self._transfer.bell

    def is_moving(self) -> bool:
        return self._cache.in_flight > 0

    def poll(self, now: float) -> list[SessionReply]:
        """Tell the cache which transfers of KV have ended, and start the transfers that are due. Called in every turn
        of the loop, even without work. Returns answers to session requests that have become ready."""
        self._step.order_next(now)
        if not self.has_work():
            # Poll twice when idle: a save that has just ended can be written to disk now, not during the next
            # request.
            self._step.order_next(now)
        return self._sessions.take_replies() if self._sessions.unanswered else []

    def step(self, now: float, before_long: Callable[[], None] = lambda: None) -> list[Output]:
        """Run one batch, or wait a moment if everything that could run waits for its KV. If this raises, call
        `fail_all`. before_long: called after scheduling and before computing, if the step is long and some request runs
        in it for the first time."""
        refused: list[Output] = []
        if self._requests.held or self._cache.parking.hopeless:
            refused = self._requests.before_step(now)
        return refused + self._step.run(now, before_long)

    def idle(self, now: float) -> None:
        """Do what is due about once a second: expire sessions, touch memory ahead of its first use, and log an error if
        pages stay pinned when nothing runs."""
        choices = self._requests.choices
        self._cache.sessions.sweep(now)
        self._first_touch.go_on(*self._cache.reached, lambda: bool(choices))
        self._cache.pages_are_ready(self._first_touch.pages_ready)
        if not choices and self._cache.num_leases and not self._cache.in_flight:
            log.error("%d pages are pinned although nothing runs", self._cache.num_leases)

    def close(self) -> None:
        """Write what was computed to disk, within a deadline, and end the threads. No other method may be called
        afterwards."""
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        self._requests.close()
        self._cache.sessions.deletions.retry()  # the next process would find what the disk would not delete
        self.poll(time.monotonic())
        while self._cache.in_flight and time.monotonic() < end:
            self._transfer.wait(0.05)
            self.poll(time.monotonic())
        self._transfer.close(max(0.0, end - time.monotonic()))
        self._step.close()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def sessions(self, request: SessionRequest, now: float) -> list[SessionReply]:
        """Carry out a request about sessions, and return its answer. The answer to a deletion comes later, from `poll`,
        when the bytes are gone."""
        return self._sessions.apply(request, now)

    def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
        """Begin to take over a session of another replica. Returns a refusal at once, or nothing; then `poll` returns
        the answer, when Redis has sent the headers of the session's extents."""
        return self._sessions.adopt(request, now)

    def take_heads(self) -> list[Head]:
        """Return the heads that have changed since `take_heads` was last called. (A head is the record by which another
        replica can take over a session.)"""
        return self._sessions.take_heads() if self._sessions.has_heads else []
