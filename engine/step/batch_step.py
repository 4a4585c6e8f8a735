"""Runs one step of the engine: schedule, move KV, compute, settle (count what was computed and have it saved), draw
tokens."""

import logging
import time
from collections.abc import Callable

from reprise.cache.manager import CacheManager
from reprise.engine.messages import Output
from reprise.engine.step.choices import RunningChoices
from reprise.engine.step.compute import Computed, StepCompute
from reprise.engine.step.drawing import Drawing
from reprise.engine.step.moves import StepMoves
from reprise.engine.step.ports import DraftMaker
from reprise.engine.step.restarts import Restarts
from reprise.kernels.device_errors import lacks_memory
from reprise.scheduler.budgets.budget import StepWork
from reprise.scheduler.schedule import Schedule
from reprise.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_LONG = 256  # tokens; a CPU computes them in half a second, or several with a large model


class StepClock:
    """A clock for one step, which continues the clock of the caller: `now()` is the time that the caller gave, plus the
    seconds since. The caller's clock is monotonic, in seconds, and need not be this machine's."""

    def __init__(self, now: float) -> None:
        self.called = now
        self._called_s = self._computing_s = time.monotonic()

    def begin_computing(self) -> None:
        """Start counting the seconds of computing. The time before, in which the step was scheduled, is left out."""
        self._computing_s = time.monotonic()

    def now(self) -> float:
        """Return the time on the caller's clock."""
        return self.called + (time.monotonic() - self._called_s)

    def computing_s(self) -> float:
        """Return the seconds since `begin_computing`."""
        return time.monotonic() - self._computing_s


class BatchStep:
    """A runner of one batch after the other. Called by the Engine, on its thread.

    Tokens are counted as computed only after the forward pass that writes their KV was launched, and everything that
    reads that KV is launched later.
    """

    def __init__(
        self,
        *,
        cache: CacheManager,
        scheduler: Scheduler,
        choices: RunningChoices,
        compute: StepCompute,
        moves: StepMoves,
        restarts: Restarts,
        drawing: Drawing,
        drafter: DraftMaker | None,
    ) -> None:
        """Set up. drafter: None if nothing is drafted."""
        self._cache, self._scheduler, self._choices = cache, scheduler, choices
        self._compute, self._moves, self._restarts, self._drawing = compute, moves, restarts, drawing
        self._drafter = drafter
        self._under_way: tuple[Computed, StepWork] | None = None  # a step that drew nothing, and may not be over
        self.count = 0
        """Number of steps since the start whose duration is known."""
        self.seconds = 0.0
        """Seconds that the steps in `count` took together."""

    def order_next(self, now: float) -> None:
        """Tell the cache which transfers of KV have ended, and start the transfers that are due. Sequences whose load
        has failed start anew."""
        if failed := self._moves.catch_up(now):
            self._restarts.failed(failed)
        self._moves.order_next(now)

    def run(self, now: float, before_long: Callable[[], None]) -> list[Output]:
        """Run one batch, or wait a moment if everything that could run waits for its KV. If this raises, the caller
        ends every request and then calls `fail`. before_long: called after scheduling and before computing, if the step
        has at least _LONG tokens and some request runs in it for the first time."""
        clock = StepClock(now)
        schedule, begins = self._schedule(now)
        self._moves.begin_step(schedule)
        if not schedule.chunks:
            self._moves.wait()
            return []
        if begins and sum(chunk.num_tokens for chunk in schedule.chunks) >= _LONG:
            before_long()
        clock.begin_computing()
        computed = self._launch(schedule)
        if computed is None:
            return []
        self._learn_before()
        self._settle(computed, clock)
        outputs = self._drawing.draw(computed, clock.now())
        if computed.done.is_done:
            seconds = clock.computing_s()
            self._learn(computed, seconds)
            self._scheduler.ran(seconds, computed.waited_s)
        else:
            self._under_way = computed, schedule.work
        return outputs

    def fail(self) -> None:
        """Clean up after a step that has raised, when every request has been ended."""
        self._moves.fail()

    def close(self) -> None:
        """End the thread that copies layers' weights to HBM, if there is one. No other call follows."""
        self._compute.close()

    def _schedule(self, now: float) -> tuple[Schedule, bool]:
        """Decide which sequences run, with how many tokens each. For those that run for the first time, note in which
        tier their KV was found. Returns (schedule, whether some sequence runs for the first time)."""
        schedule, begins = self._scheduler.schedule(now), False
        for sequence in schedule.preempted:
            self._compute.tables.drop(sequence.request_id)
        for chunk in schedule.chunks:
            choice = self._choices[chunk.sequence.request_id]
            choice.begin_step(now)
            if choice.report is None:
                begins = True
                choice.report = self._cache.requests.report(chunk.sequence.request_id)
                chunk.sequence.cached_tokens = choice.report.cached_tokens
                choice.reuse_s = self._scheduler.reuse_s(chunk.sequence)
        return schedule, begins

    def _launch(self, schedule: Schedule) -> Computed | None:
        """Compute the scheduled tokens. Returns None if the device lacked memory for it; later steps are then smaller.
        Raises if smaller steps are of no use."""
        drafts = {} if self._drafter is None else self._drafter.propose(schedule.chunks, self._choices)
        try:
            return self._compute.run(schedule.chunks, self._choices, drafts)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            problem = error.with_traceback(None)  # its frames would keep what was computed so far
        for chunk in schedule.chunks:
            self._choices[chunk.sequence.request_id].draft = []
        self._compute.free_memory()
        if not self._scheduler.halve_steps(schedule):
            raise problem
        log.warning("steps have at most half as many tokens from now on: %s", problem)
        return None

    def _settle(self, computed: Computed, clock: StepClock) -> None:
        """Count what was computed and have it saved. Choices whose KV was not loaded in time, or was wrong, start
        anew."""
        void: set[str] = set()
        failed = self._moves.hear_failed(clock.called)
        if failed or computed.late:
            void = self._restarts.void(computed, set(failed), clock.now())
        captured, pieces = self._compute.capture(computed, void)
        self._moves.hold(captured, pieces)
        for chunk in computed.chunks:
            sequence_id = chunk.sequence.request_id
            if sequence_id not in void:
                self._cache.requests.commit(sequence_id, chunk.num_tokens)
                if (shares := computed.attention.get(sequence_id)) is not None:
                    self._cache.requests.attended(sequence_id, shares)
                chunk.sequence.computed_tokens += chunk.num_tokens
                self._choices[sequence_id].load_wait_s += computed.waited_s
        if void:
            computed.drop(void)
        if self._restarts.verifier is not None:
            self._restarts.contradicted(computed)

    def _learn_before(self) -> None:
        """Learn the duration of the previous step, if it had not ended when `run` returned."""
        if self._under_way is not None:
            (computed, work), self._under_way = self._under_way, None
            seconds = computed.done.seconds_since(computed.begun)
            self._learn(computed, seconds)
            self._scheduler.cost.ran(work, seconds - computed.waited_s)

    def _learn(self, computed: Computed, seconds: float) -> None:
        """Tell all parts that predict steps how long this one took."""
        self.count += 1
        self.seconds += seconds
        if not computed.reads_parked:
            self._cache.rates.computed(computed.num_tokens, seconds - computed.waited_s)
        if self._drafter is not None and computed.only_decodes and not computed.waited_s:
            self._drafter.stepped(computed.num_tokens, seconds)
