"""Engine: requests in, tokens out."""

import logging
import time
from collections.abc import Callable

from reprise.cache.manager import CacheManager
from reprise.cache.storage.first_touch import FirstTouch
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.messages import Adopt, Head, ModelInfo, Output, SessionReply, SessionRequest, Stats, Submit
from reprise.engine.requests import KnownRequests
from reprise.engine.sessions import SessionDirectory
from reprise.engine.step.batch_step import BatchStep
from reprise.kernels.device_errors import is_sticky

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 8.0  # for what was computed to reach the disk


class Engine:
    """The engine that `reprise.engine.process.loop` drives: see its `StepEngine`. Single-threaded: that loop calls it.
    `now` is a monotonic clock in seconds.

    Whatever goes wrong in a step, what was committed before it stays right. Where a device fails behind the host's
    back, it fails for good, and the engine ends (`is_fatal`).
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
        stats: Callable[[], Stats],
    ) -> None:
        self.model = model
        self._cache, self._transfer, self._first_touch = cache, transfer, first_touch
        self._requests, self._step, self._sessions = requests, step, sessions
        self.stats = stats
        """Returns what the parts of the engine know, as of now."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def accept(self, request: Submit, now: float) -> list[Output]:
        """See `Intake.open_request`."""
        return self._requests.accept(request, now)

    def abort(self, request_id: str) -> None:
        """See `KnownRequests.abort`."""
        self._requests.abort(request_id)

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """See `KnownRequests.finish`."""
        self._requests.finish(request_id, choice, keep_tokens)

    def finish_all(self, now: float) -> list[Output]:
        """End everything with finish_reason `length`."""
        return self._requests.finish_all(now)

    def fail_all(self, message: str) -> list[Output]:
        """End everything with an error. Nothing of the failed step is kept: half of it may have been written."""
        outputs = self._requests.fail_all(message)
        self._step.fail()
        return outputs

    @staticmethod
    def is_fatal(error: Exception) -> bool:
        """Whether a device has failed for good, see `reprise.kernels.device_errors`. Running out of memory passes."""
        return is_sticky(error)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._requests.choices or self._requests.held)

    @property
    def bell(self) -> int:
        """A file descriptor that can be read when something has ended that `poll` should hear of."""
        return self._transfer.bell

    def is_moving(self) -> bool:
        return self._cache.in_flight > 0

    def poll(self, now: float) -> list[SessionReply]:
        """Hear what the transfers have done, and order what comes next. Called in every turn of the loop, work or not.
        Returns answers to session requests that have become ready."""
        self._step.order_next(now)
        if not self.has_work():
            # What a turn has left may have been saved at once: then it is written while nobody waits, instead of beside
            # the next request, with which the loop would hear of it.
            self._step.order_next(now)
        return self._sessions.take_replies() if self._sessions.unanswered else []

    def step(self, now: float) -> list[Output]:
        """Run one batch. When it raises, call `fail_all`."""
        refused: list[Output] = []
        if self._requests.held or self._cache.parking.hopeless:
            refused = self._requests.before_step(now)
        return refused + self._step.run(now)

    def idle(self, now: float) -> None:
        """TTL sweep, memory for what comes, and the invariant that must hold when nothing runs."""
        choices = self._requests.choices
        self._cache.sessions.sweep(now)
        self._first_touch.go_on(*self._cache.reached, lambda: bool(choices))
        self._cache.pages_are_ready(self._first_touch.pages_ready)
        if not choices and self._cache.num_leases and not self._cache.in_flight:
            log.error("%d pages are pinned although nothing runs", self._cache.num_leases)

    def close(self) -> None:
        """Let what was computed reach the disk, within a deadline. Nothing else may be called afterwards."""
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
        """Answer what is asked about sessions; a deletion is answered by `poll` when the bytes are gone."""
        return self._sessions.apply(request, now)

    def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
        """Take over a session of another replica; answered by `poll` when the headers of its extents have come."""
        return self._sessions.adopt(request, now)

    def take_heads(self) -> list[Head]:
        """Return the heads of sessions that have changed since the last call."""
        return self._sessions.take_heads() if self._sessions.has_heads else []
