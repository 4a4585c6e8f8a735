"""The continuous batch: which sequences run in the next step, and how many tokens of each."""

from collections import Counter
from typing import Any

from reprise.scheduler.budgets.budget import LEAST_CHUNK, Pace, StepCost, StepWork
from reprise.scheduler.budgets.step_budgets import StepBudgets
from reprise.scheduler.early_loads import EarlyLoads
from reprise.scheduler.forecast import Forecast
from reprise.scheduler.giving_way import GivingWay
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.line import Line
from reprise.scheduler.load_ahead import LoadAhead, TimedLoadAhead
from reprise.scheduler.nearness import Nearness
from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.queues.waiting_queue import WaitingQueue
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.schedule import Schedule, StepDraft
from reprise.scheduler.sequence import Sequence, SequenceState
from reprise.scheduler.tenants import Tenants
from reprise.scheduler.waiting import Waiting


class QueueFull(Exception):
    """The waiting queue is at its cap; the request was not taken."""


class Scheduler:
    """Continuous batching with chunked prefill under a budget of tokens, or of time.

    Every step decodes all running sequences, then spends what is left of the budget on prefills: of running sequences,
    then of waiting ones, in the order of `queue`. When HBM is full the sequence that arrived last is preempted and
    stands first in line again, before the queue; what it computed stays cached (`RunningBatch`). While all places are
    taken, those next in line get their pages in time for their KV to come while others run (`LoadAhead`); they give way
    to running ones that need the room. With `fair_places`, a tenant that has nothing running does not wait until
    another's requests have ended (`GivingWay`). Pure: single-threaded, no clock of its own.
    """

    def __init__(
        self,
        *,
        cache: CacheView,
        queue: WaitingQueue,
        predictor: LengthPredictor,
        cost: StepCost,
        limits: SchedulerLimits,
        fair_places: bool,
        scores: bool,
        timed_loads: bool,
    ) -> None:
        """fair_places: tenants share the places. scores: the cache is told which requests need their KV soon.
        timed_loads: CaR's timer says when early loads begin; without it, as soon as their pages fit."""
        self._cache = cache
        self._limits = limits
        self.cost = cost
        self.queue = queue
        """Read only."""
        self._tenants = tenants = Tenants(fair_places=fair_places)
        self._pace = pace = Pace()
        self._forecast = forecast = Forecast(predictor=predictor, pace=pace)
        self._waiting = waiting = Waiting(queue=queue)
        self._early = early = EarlyLoads(cache=cache, forecast=forecast)
        self._batch = batch = RunningBatch(
            cache=cache, waiting=waiting, early=early, tenants=tenants, forecast=forecast, cost=cost, limits=limits
        )
        self._budgets = StepBudgets(cost=cost, limits=limits, batch=batch, waiting=waiting, tenants=tenants)
        self._giving_way = GivingWay(
            cache=cache, waiting=waiting, batch=batch, tenants=tenants, budgets=self._budgets, limits=limits
        )
        loads: dict[str, Any] = {"cache": cache, "waiting": waiting, "batch": batch, "early": early, "limits": limits}
        self._load_ahead = TimedLoadAhead(**loads, forecast=forecast) if timed_loads else LoadAhead(**loads)
        self._nearness = Nearness(cache=cache, waiting=waiting, batch=batch) if scores else None
        self._lacks_room = False  # a waiting sequence found no room in HBM, and none has ended since
        self._work = StepWork()  # work of the step that was scheduled last
        self._sat_out: frozenset[Sequence] = frozenset()  # sequences that sat out that step: see `StepDraft.sits_out`
        self._began_s = 0.0  # start of that step
        self._ran: tuple[float, float] | None = None  # its seconds, and those of them waited for loads; None: learned

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences in order of admission."""
        return tuple(self._batch.sequences)

    @property
    def num_waiting(self) -> int:
        return self._waiting.count

    @property
    def free_places(self) -> int:
        """Number of sequences that may run beside those that do."""
        return self._batch.free_places

    @property
    def num_starting(self) -> int:
        """Number of waiting sequences that may start in the next step, and load for themselves: as many as there are
        places, but none while HBM has no room for the first."""
        return 0 if self._lacks_room else self._batch.free_places

    @property
    def preemptions(self) -> int:
        return self._batch.preemptions

    @property
    def fair_preemptions(self) -> int:
        """The preemptions for the sake of another tenant."""
        return self._giving_way.preemptions

    @property
    def loads(self) -> Counter[str]:
        """Loads by what became of them; see `RunningBatch.loads`."""
        return self._batch.loads

    @property
    def timer_outcomes(self) -> Counter[str]:
        """Early loads by when they ended; see `EarlyLoads.outcomes`."""
        return self._early.outcomes

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens of a stream; see `Pace.tpot_s`."""
        return self._pace.tpot_s

    @property
    def predicted_tokens(self) -> Counter[str]:
        """Tokens by which predicted lengths were off; see `Forecast.errors`."""
        return self._forecast.errors

    def has_work(self) -> bool:
        return bool(self._batch.sequences or self._waiting.count)

    def has_early_load(self, sequence: Sequence) -> bool:
        """Whether it waits with its pages already given."""
        return sequence in self._early

    def upcoming(self) -> Line[str]:
        """Request ids in the order in which their KV is needed, next first; the cache plans by it."""
        waiting = self._waiting
        if not (waiting.count or waiting.seen.members):
            return waiting.seen  # none waits, and none did at the last call
        return waiting.line(self._giving_way.starved())

    def outlook(self) -> list[tuple[Sequence, float | None]]:
        """The sequences whose order is settled, next first, each with the seconds until its place is expected to be
        free; None after the last of the running ones."""
        opens_s = self._forecast.opens_s(self._batch.sequences, self._batch.free_places)
        front = self._waiting.front()
        return [(sequence, opens_s[place] if place < len(opens_s) else None) for place, sequence in enumerate(front)]

    # --- events -------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that the cache has opened. Raises QueueFull."""
        if self._waiting.count >= self._limits.max_queued:
            raise QueueFull(f"{self._waiting.count} requests are waiting")
        self._tenants.arrived(sequence)
        self._waiting.add(sequence)

    def completed(self, sequence: Sequence) -> None:
        """Its answer has come to its own end; call it before `remove`."""
        self._forecast.completed(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence finished or was aborted, in whatever state it was."""
        self._lacks_room = False
        if sequence.state is SequenceState.RUNNING:
            self._batch.stop(sequence)
        elif sequence.state is SequenceState.WAITING:
            if sequence in self._early:
                self._early.withdraw(sequence)
            self._waiting.remove(sequence)
        if self._nearness is not None:
            self._nearness.forget(sequence)
        self._forecast.forget(sequence)
        if sequence.state is not SequenceState.FINISHED:
            self.queue.finished(sequence)
            self._tenants.left(sequence)
        sequence.state = SequenceState.FINISHED

    def requeue(self, sequence: Sequence) -> None:
        """A sequence has lost its room in HBM. One that ran stands first in line again; one that had it before its turn
        keeps its place."""
        if sequence in self._early:
            self._early.lose(sequence)
        else:
            self._batch.lose_room(sequence)

    def ran(self, seconds: float, waited_s: float) -> None:
        """The step that was scheduled last has run. waited_s: of its seconds, those in which it waited for loads."""
        self._ran = seconds, waited_s
        if not self.has_work():
            self._learn(seconds)

    def ran_before(self, work: StepWork, seconds: float) -> None:
        """A step without decodes is known to have taken so long, waiting for loads not included, after another
        was scheduled."""
        self.cost.ran(work, seconds)

    def halve_steps(self, schedule: Schedule) -> bool:
        """A step has failed for want of memory: no later one has more than half of its tokens. Returns False where
        that is of no use, because prompts are not what it consisted of or are not to be split."""
        num_tokens = sum(chunk.num_tokens for chunk in schedule.chunks)
        can = self._limits.chunked_prefill and schedule.work.prefill_tokens > 0 and num_tokens >= 2 * LEAST_CHUNK
        if can:
            self._budgets.most_tokens = num_tokens // 2
        return can

    # --- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Schedule:
        """Return what runs in the next step. It is empty while a sequence runs or waits only if what it needs is on its
        way, as long as every sequence alone fits into HBM; the engine sees to that on arrival."""
        self._learn(now - self._began_s)
        step = self._decode(now)
        self._lacks_room = False
        if step.prefills or self._waiting.count:
            self._fill(step)
        return self._finish(step)

    def _learn(self, period_s: float) -> None:
        """Learn from the last step: it cost the decoding sequences all the time from its start to the next one's."""
        if self._ran is None:
            return
        seconds, waited_s = self._ran
        self._ran = None
        period_s = max(seconds, period_s)
        self.cost.ran(self._work, period_s - waited_s)
        if self._work.decode_rows:
            self._pace.decoded(period_s, self._work.prefill_tokens)

    def _decode(self, now: float) -> StepDraft:
        """Begin a step with a token of each decoding sequence."""
        if self._waiting.count or self._early.overdue:
            self.queue.refresh()
            loading = self._load_ahead.begin_step(now)
        else:
            loading = self._cache.stalls_s() if self._batch.has_loads else {}
        step = StepDraft(now, loading, self._sat_out)
        self._batch.decode(step)
        step.prefills = self._batch.prefills(step.loading)
        return step

    def _fill(self, step: StepDraft) -> None:
        """Give the rest of a step to prompts: of a starved request, of running sequences, and of waiting ones."""
        step.budget = self._budgets.beside(step.chunks, step.now)
        self._giving_way.admit(step)
        self._batch.prefill(step)
        self._admit(step)
        self._start_loads(step)

    def _admit(self, step: StepDraft) -> None:
        """Admit waiting sequences, as far as places, budget and HBM go."""
        # Room that was just taken from one is not given to another.
        self._lacks_room = bool(step.preempted) or not self._admit_in_order(step)

    def _admit_in_order(self, step: StepDraft) -> bool:
        """Return False if a sequence has found no room."""
        skipped: set[Sequence] = set()
        has_room = True
        while self._batch.free_places:
            sequence = self._waiting.next(skipped)
            if sequence is None:
                return has_room
            if self._cache.waits_for_sibling(sequence.request_id, is_due=True):
                skipped.add(sequence)  # keeps its place; those after it may go first
                if sequence is self._waiting.favoured:
                    self._waiting.favoured = None  # other sequences may pass it until it can start
                continue
            reserved = self._batch.place(sequence, step.budget)
            if reserved:
                self._batch.start(sequence, reserved, step)
                continue
            if reserved == 0:
                return has_room
            has_room = False
            if not self._waiting.may_be_passed(sequence, step.now):
                return has_room
            skipped.add(sequence)
        return has_room

    def _start_loads(self, step: StepDraft) -> None:
        """Start early loads, unless a waiting sequence lacks HBM: loads for later ones would keep it out, step after
        step."""
        if not self._lacks_room:
            self._load_ahead.start_loads(step.now)

    def _finish(self, step: StepDraft) -> Schedule:
        self._giving_way.is_full = self._waiting.count > 0
        if self._nearness is not None:
            self._nearness.tell()
        self._work, self._sat_out, self._began_s = StepWork.of(step.chunks), step.sits_out, step.now
        return Schedule(step.chunks, step.preempted, self._work)
