"""Implements continuous batching: chooses which sequences run in the next step, and how many tokens of each."""

from collections import Counter

from reprise.scheduler.budgets.budget import LEAST_CHUNK, StepCost, StepWork
from reprise.scheduler.budgets.saved import prompt_s, reuse_s
from reprise.scheduler.budgets.step_budgets import StepBudgets
from reprise.scheduler.early_loads import EarlyLoads
from reprise.scheduler.forecast import Forecast
from reprise.scheduler.giving_way import GivingWay
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.line import Line
from reprise.scheduler.load_ahead import LoadParts
from reprise.scheduler.policy import Policy
from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.schedule import Schedule, StepDraft
from reprise.scheduler.sequence import Sequence, SequenceState
from reprise.scheduler.tenants import Tenants
from reprise.scheduler.waiting import Waiting

_FRONT = 8  # waiting sequences of which `outlook` tells


class QueueFull(Exception):
    """The waiting queue has reached its limit, so the request was not taken."""


class Scheduler:
    """A scheduler with continuous batching and chunked prefill, under a budget of tokens or of time per step.

    Every step computes one token of each decoding sequence, then spends the rest of the budget on prompts: first of
    running sequences, then of waiting ones in the order of `queue`.

    When HBM is full, a running sequence is preempted: the one that arrived last. It starts again before all sequences
    in the queue, and the KV that it has computed stays cached as long as there is space. With `Policy.fair_places`, the
    preempted sequence is instead the latest arrival among the sequences of those tenants that have the most sequences
    running. A tenant that has nothing running then does not wait until the requests of other tenants have ended
    (`GivingWay`).

    While the batch or the step is full, the next waiting sequences get pages early, so that their KV is loaded while
    others run (`LoadAhead`). They lose these pages when running sequences need them.

    Pure and single-threaded; the caller passes the time.
    """

    def __init__(
        self,
        *,
        cache: CacheView,
        policy: Policy,
        predictor: LengthPredictor,
        cost: StepCost,
        limits: SchedulerLimits,
    ) -> None:
        """Set up an empty scheduler. policy: the order of the waiting requests, when their early loads begin, and
        whether tenants share the batch fairly."""
        self._cache = cache
        self._limits = limits
        self.cost = cost
        """The model of what steps cost, which learns from every step that was reported to `ran`."""
        self.queue = queue = policy.queue
        """The queue of requests that have not run yet. Read only."""
        self._tenants = tenants = Tenants(fair_places=policy.fair_places)
        self._forecast = forecast = Forecast(predictor=predictor, cost=cost)
        self._waiting = waiting = Waiting(queue=queue)
        self._early = early = EarlyLoads(cache=cache, waiting=waiting)
        self._batch = batch = RunningBatch(
            cache=cache, waiting=waiting, early=early, tenants=tenants, cost=cost, limits=limits
        )
        self._budgets = StepBudgets(cost=cost, limits=limits, batch=batch, waiting=waiting, tenants=tenants)
        self._giving_way = GivingWay(
            cache=cache, waiting=waiting, batch=batch, tenants=tenants, budgets=self._budgets, limits=limits
        )
        self._load_ahead = policy.load_ahead(
            LoadParts(cache=cache, waiting=waiting, batch=batch, early=early, forecast=forecast, limits=limits)
        )
        self._lacks_room = False  # a waiting sequence found no room in HBM, and none has ended since
        self._work = StepWork()  # work of the step that was scheduled last
        self._sat_out: frozenset[Sequence] = frozenset()  # skipped the last step: see `StepDraft.sits_out`
        self._began_s = 0.0  # start of the step that was scheduled last
        self._ran: tuple[float, float] | None = None  # last step's seconds, and its waits for loads; None: learned

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences in order of admission."""
        return tuple(self._batch.sequences)

    @property
    def num_waiting(self) -> int:
        return self._waiting.count

    @property
    def num_starting(self) -> int:
        """Number of waiting sequences that may start in the next step and load their KV then: the free places in the
        batch, or 0 while HBM has no room for the first of them."""
        return 0 if self._lacks_room else self._batch.free_places

    @property
    def preemptions(self) -> int:
        return self._batch.preemptions

    @property
    def fair_preemptions(self) -> int:
        """Number of preemptions that made room for a tenant that had nothing running."""
        return self._giving_way.preemptions

    @property
    def loads(self) -> Counter[str]:
        """Counts of the KV loads of sequences since this scheduler was made, by their state when the sequence's next
        chunk is scheduled. finished: loaded by then; hidden: expected to end within the chunk's computation or soon
        after it; exposed: expected to delay the step."""
        return self._batch.loads

    def has_work(self) -> bool:
        return bool(self._batch.sequences or self._waiting.count)

    def has_early_load(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence already has pages in HBM, into which its KV is loaded early."""
        return sequence in self._early

    def upcoming(self) -> Line[str]:
        """Return the ids of waiting requests in the order in which they need their KV, next first. The
        cache plans its fetches and evictions by this order."""
        waiting = self._waiting
        if not (waiting.count or waiting.seen.members):
            return waiting.seen  # none waits, and none did at the last call
        return waiting.line(self._giving_way.starved())

    def outlook(self) -> list[tuple[Sequence, float | None]]:
        """Return the first few waiting sequences, next first, each with the seconds until a place in the batch is
        expected to be free for it, or None if those ahead of it will take all places."""
        opens_s = self._forecast.opens_s(self._batch.sequences, self._batch.free_places)
        front = self._waiting.front(_FRONT)
        return [(sequence, opens_s[place] if place < len(opens_s) else None) for place, sequence in enumerate(front)]

    # --- events -------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, whose request the cache has opened, to the waiting ones. Raises QueueFull."""
        if self._waiting.count >= self._limits.max_queued:
            raise QueueFull(f"{self._waiting.count} requests are waiting")
        self._tenants.arrived(sequence)
        self._waiting.add(sequence)

    def completed(self, sequence: Sequence) -> None:
        """Learn the answer's length from a sequence that has ended by itself, not by being aborted. Call it before
        `remove`."""
        self._forecast.completed(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or was aborted, whatever its state."""
        self._lacks_room = False
        if sequence.state is SequenceState.RUNNING:
            self._batch.stop(sequence)
        elif sequence.state is SequenceState.WAITING:
            if sequence in self._early:
                self._early.withdraw(sequence)
            self._waiting.remove(sequence)
        self._forecast.forget(sequence)
        if sequence.state is not SequenceState.FINISHED:
            self.queue.finished(sequence)
            self._tenants.left(sequence)
        sequence.state = SequenceState.FINISHED

    def requeue(self, sequence: Sequence) -> None:
        """Move a sequence that has lost its room in HBM back to the waiting ones. If it was running it becomes the
        first of them; if it still waited, with pages for an early load, it keeps its place in the queue."""
        if sequence in self._early:
            self._early.lose(sequence)
        else:
            self._batch.lose_room(sequence)

    def ran(self, seconds: float, waited_s: float) -> None:
        """Note that the step scheduled last took `seconds`, of which it waited `waited_s` for loads."""
        self._ran = seconds, waited_s
        if not self.has_work():
            self._learn(seconds)

    def halve_steps(self, schedule: Schedule) -> bool:
        """Limit later steps to half the tokens of `schedule`, which failed for want of memory. Return False, with
        nothing changed, if that cannot help: the step had no prompts, prompts may not be split, or it was too small to
        halve."""
        num_tokens = sum(chunk.num_tokens for chunk in schedule.chunks)
        can = self._limits.chunked_prefill and schedule.work.prefill_tokens > 0 and num_tokens >= 2 * LEAST_CHUNK
        if can:
            self._budgets.most_tokens = num_tokens // 2
        return can

    def reuse_s(self, sequence: Sequence) -> float:
        """Return about how many seconds later the sequence's first token would come if its cached tokens had to be
        computed; see `reprise.scheduler.budgets.saved`."""
        return reuse_s(
            self.cost,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            step_tokens=self._step_tokens(sequence),
        )

    def prompt_s(self, sequence: Sequence, num_read: int) -> float:
        """Return about how many seconds it takes to compute the prompt without its first `num_read` tokens, if nothing
        else runs."""
        num_tokens = sequence.prompt_tokens - num_read
        return prompt_s(self.cost, num_tokens, num_read, step_tokens=self._step_tokens(sequence))

    def expected(self, sequence: Sequence) -> tuple[int, float]:
        """Return (tokens of a waiting sequence's prompt that are stored now, seconds that loading them would delay its
        first token)."""
        found = self._cache.residency(sequence.request_id)
        return max(0, sequence.prompt_tokens - found.missing_tokens), found.exposed_s

    def places(self) -> dict[str, int]:
        """Return how many others are ahead of each waiting sequence, by its request id. A starved request (its
        tenant has nothing running) starts before the queue, but is counted at its place in it."""
        line = self._waiting.front(self._waiting.count)
        return {sequence.request_id: place for place, sequence in enumerate(line)}

    def _step_tokens(self, sequence: Sequence) -> int:
        """Return the most tokens of the sequence's prompt that a step computes while nothing decodes."""
        limits, most_tokens = self._limits, self._budgets.most_tokens
        lone_tokens = limits.lone_step_tokens if limits.chunked_prefill else sequence.prompt_tokens
        return max(1, lone_tokens if most_tokens is None else min(lone_tokens, most_tokens))

    # --- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Schedule:
        """Return the next step. If sequences run or wait, an empty step means that all of them wait for KV or room that
        is on its way. That holds only if every single sequence fits into HBM, which the engine checks on arrival. now:
        seconds on the clock of `Sequence.arrived_s`."""
        self._learn(now - self._began_s)
        step = self._decode(now)
        self._lacks_room = False
        if step.prefills or self._waiting.count:
            self._fill(step)
        return self._finish(step)

    def _learn(self, period_s: float) -> None:
        """Learn from the last step, which cost the decoding sequences the time from its start to the next step's,
        `period_s`."""
        if self._ran is None:
            return
        (seconds, waited_s), self._ran = self._ran, None
        self.cost.ran(self._work, max(seconds, period_s) - waited_s)

    def _decode(self, now: float) -> StepDraft:
        """Begin a step: add one token of each decoding sequence."""
        if self._waiting.count:
            self.queue.refresh(now)
        loading = self._cache.stalls_s() if self._batch.has_loads else {}
        step = StepDraft(now, loading, self._sat_out)
        self._batch.decode(step)
        step.prefills = self._batch.prefills(step.loading)
        return step

    def _fill(self, step: StepDraft) -> None:
        """Spend the rest of a step on prompts: first of a starved request (its tenant has nothing running), then of
        running sequences, then of waiting ones."""
        step.budget = self._budgets.beside(step.chunks, step.now)
        self._giving_way.admit(step)
        self._batch.prefill(step)
        # Room that was just taken from one is not given to another.
        self._lacks_room = bool(step.preempted) or not self._admit(step)
        # Where a sequence finds no room, pages for the loads of later ones would keep it out, step after step.
        if not self._lacks_room:
            self._load_ahead.start_loads()

    def _admit(self, step: StepDraft) -> bool:
        """Start waiting sequences in order, as far as places in the batch, the step's budget and HBM allow. Return
        False if one of them found no room in HBM."""
        skipped: set[Sequence] = set()
        has_room = True
        while self._batch.free_places and (sequence := self._waiting.next(skipped)) is not None:
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
                break
            has_room = False
            if not self._waiting.may_be_passed(sequence, step.now):
                break
            skipped.add(sequence)
        return has_room

    def _finish(self, step: StepDraft) -> Schedule:
        self._giving_way.is_full = self._waiting.count > 0
        self._load_ahead.end_step()
        self._work, self._sat_out, self._began_s = StepWork.of(step.chunks), step.sits_out, step.now
        return Schedule(step.chunks, step.preempted, self._work)
