"""The continuous batch: who runs in the next step, and how many tokens of each."""

from collections import Counter, deque
from collections.abc import Container
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from scheduler import timer
from scheduler.budget import STALL_BUDGET_S, StepBudget, StepCost, StepWork, TimeBudget, TokenBudget
from scheduler.early_loads import AheadLoads
from scheduler.forecast import Forecast
from scheduler.line import Line
from scheduler.ports import CacheView
from scheduler.predictor import LengthPredictor
from scheduler.priced import PricedBudget
from scheduler.priority import Standings, standing
from scheduler.queues import WaitingQueue
from scheduler.sequence import Sequence, SequenceState
from scheduler.shortest import ShortestFirst
from scheduler.tenants import Tenants

_FRONT = 4  # of those who wait, so many are looked at for loads to start
_FRONT_TOKENS = 256  # and so many tokens of theirs, one request at least, are looked up again in a step
_STRETCH = 1.5  # of the usual length, for a step that ends a starved prompt by itself: another would cost as much


class QueueFull(Exception):
    """The waiting queue is at its cap; the request was not taken."""


class Chunk(NamedTuple):
    """`num_tokens` pending tokens of a sequence, to be computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether this chunk ends with the newest token, so that the next one can be sampled."""
        return self.num_tokens == self.sequence.pending_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. Room for its chunks is reserved."""

    chunks: list[Chunk]
    preempted: list[Sequence]  # gave their pages back; they wait at the head of the line


class Scheduler:
    """Continuous batching with chunked prefill under a budget of tokens, or of time.

    Every step decodes all running sequences, then spends what is left of the budget on prefills: of those who run, then
    of those who wait, in the order of `queue`. When HBM is full the sequence that arrived last is preempted and stands
    first in line again, before the queue; what it computed stays cached. While all places are taken, those next in line
    get their pages as soon as the timer says that their KV has to start coming: the read buffer of AttentionStore
    §3.2.1, filled behind the steps of those who run. They give way to them when these need the room.

    With `fair_places`, a tenant who has nothing running does not wait until another's requests have ended: one of these
    gives way, as for memory, and the step is its own as far as its target of time allows; the answers of tenants with
    more than one sit it out if the prompt can be ended in it that way and no other. And while several tenants come,
    steps without decodes keep to the ITL target as well: who comes next waits for one. Pure: single-threaded, no clock
    of its own.
    """

    def __init__(
        self,
        *,
        cache: CacheView,
        queue: WaitingQueue,
        predictor: LengthPredictor,
        cost: StepCost,
        max_seqs: int,
        max_queued: int,
        step_tokens: int,
        lone_step_tokens: int,
        itl_target_s: float | None,
        least_chunk_tokens: int,
        chunked_prefill: bool,
        fair_places: bool,
        scores: bool,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._cost = cost
        self._max_seqs = max_seqs
        self._max_queued = max_queued
        self._step_tokens = step_tokens  # while somebody decodes, and so waits for the end of every step
        self._lone_step_tokens = lone_step_tokens  # while nobody does
        # What a step may take while somebody decodes; 0: whatever its tokens take; None: what serves all of them best.
        self._itl_target_s = itl_target_s
        self._least_chunk_tokens = least_chunk_tokens  # below which products are inefficient
        self._chunked_prefill = chunked_prefill
        self._scoring = scores  # the cache is told who needs its KV soon
        self._tenants = Tenants(fair_places=fair_places)
        self._resumed: deque[Sequence] = deque()  # lost their room, and stand before the queue
        self._running: list[Sequence] = []  # in order of admission
        self._shortest = ShortestFirst() if queue.passes_over else None
        self._forecast = Forecast(predictor=predictor)
        self._ahead = AheadLoads(cache=cache, forecast=self._forecast)  # wait, but have their pages
        self._favoured: Sequence | None = None  # others have given way to it, but there is not room enough yet
        self._front = Standings(cache=cache, standing=standing)
        self._sat_out: frozenset[Sequence] = frozenset()  # had no row in the last step, for a starved one's sake
        self._scores: dict[Sequence, int] = {}  # as the cache was told
        self._close: tuple[list[Sequence], int] = [], -1  # whom it was told of beside those who ran, and as of when
        self._rows: dict[Sequence, Chunk] = {}  # of those who run: the one token that each decodes in nearly every step
        self._batch_changes = 0  # how many have joined and left
        self._loading_s = 0.0  # what is left of the loads under way
        self._foreseen = -1, 0  # changes, and loads ahead, when the queue was told what is to come
        self._opens: tuple[int, list[float]] = -1, []  # of this step: changes, and when places will be free
        self._is_full = False  # the last step left somebody waiting
        self._lacks_room = False  # of HBM, for one of those, and nobody has ended since
        self._line: Line[str] = Line()  # the ids of all who wait
        self._made_of: tuple[int, tuple[Sequence, ...]] = 0, ()  # version of the queue's line, and those before it
        self._work = StepWork()  # of the step that was scheduled last
        self._began_s = 0.0  # and when
        self._ran: tuple[float, float] | None = None  # its seconds, and those of them waited for loads; None: learned
        self.preemptions = 0
        self.fair_preemptions = 0  # of these, for the sake of another tenant
        self._loaders: set[Sequence] = set()  # of those who run: have loaded, and computed nothing yet
        self.loads: Counter[str] = Counter()  # at the first chunk of those with KV to load: finished, hidden, exposed

    @property
    def num_waiting(self) -> int:
        return len(self._resumed) + len(self._queue)

    @property
    def free_places(self) -> int:
        """How many more sequences may run at once."""
        return self._max_seqs - len(self._running)

    @property
    def num_starting(self) -> int:
        """How many of those who wait may start in the next step, and load for themselves: as many as there are places,
        but nobody while HBM has no room for the first."""
        return 0 if self._lacks_room else self.free_places

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def timer_outcomes(self) -> Counter[str]:
        """See `AheadLoads.outcomes`."""
        return self._ahead.outcomes

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens of a stream; 0 before the first."""
        return self._forecast.tpot_s

    @property
    def predicted_tokens(self) -> Counter[str]:
        """See `Forecast.errors`."""
        return self._forecast.errors

    def has_work(self) -> bool:
        return bool(self._running or self.num_waiting)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that the cache has opened. Raises QueueFull."""
        if self.num_waiting >= self._max_queued:
            raise QueueFull(f"{self.num_waiting} requests are waiting")
        self._tenants.arrived(sequence)
        self._queue.add(sequence)

    def upcoming(self) -> Line[str]:
        """Request ids in the order in which their KV is needed, next first; the cache plans by it. The version tells
        whether anything has changed."""
        queued, starved = self._queue.upcoming(), self._starved()
        first = tuple(self._resumed) if starved is None else (*self._resumed, starved)
        if (made_of := (queued.version, first)) != self._made_of:
            self._made_of = made_of
            others = queued.members if starved is None else [s for s in queued.members if s is not starved]
            ids = tuple([sequence.request_id for sequence in (*first, *others)])
            if ids != self._line.members:
                self._line = self._line.followed_by(ids)
        return self._line

    def completed(self, sequence: Sequence) -> None:
        """Its answer has come to its own end; call it before `remove`."""
        self._forecast.completed(sequence)

    def outlook(self, now: float) -> list[tuple[Sequence, float | None]]:
        """Those whose order is settled, next first, each with the seconds until its place is expected to be free; None
        behind the last of those who run."""
        self._begin_forecast()
        rest_s = self._opens_s(now)
        front = [*self._resumed, *self._queue.front()]
        return [(sequence, rest_s[place] if place < len(rest_s) else None) for place, sequence in enumerate(front)]

    @property
    def cost(self) -> StepCost:
        return self._cost

    @property
    def queue(self) -> WaitingQueue:
        """Read only."""
        return self._queue

    def is_ahead(self, sequence: Sequence) -> bool:
        """Whether it waits with its pages already given."""
        return sequence in self._ahead

    def remove(self, sequence: Sequence) -> None:
        """A sequence finished or was aborted, in whatever state it was."""
        self._lacks_room = False
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence)
        elif sequence.state is SequenceState.WAITING:
            if sequence in self._ahead:
                self._ahead.withdraw(sequence)
            if sequence is self._favoured:
                self._favoured = None
            if sequence in self._resumed:
                self._resumed.remove(sequence)
            else:
                self._queue.remove(sequence)
        self._scores.pop(sequence, None)
        self._forecast.forget(sequence)
        if sequence.state is not SequenceState.FINISHED:
            self._queue.finished(sequence)
            self._tenants.left(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self, now: float) -> Schedule:
        """What runs in the next step. Empty while a sequence runs or waits only if what it needs is on its way, as long
        as every sequence alone fits into HBM; the engine sees to that on arrival."""
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        self._learn(now - self._began_s)
        self._queue.refresh()
        self._begin_forecast()
        loading = self._stalls_s()
        self._foresee(loading, now)
        decoding = [
            s for s in self._running if len(s.token_ids) - s.computed_tokens == 1 and s.request_id not in loading
        ]
        full = self._cache.without_room([sequence.request_id for sequence in decoding])
        for sequence in decoding:
            # A preemption further up may have taken this one out.
            if sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.request_id not in full or self._make_room(sequence, 1, chunks, preempted):
                if sequence in self._loaders:
                    self._count_load(sequence, 1, 0.0)
                chunks.append(self._rows.get(sequence) or self._row(sequence))
        prefills = self._prefills(loading)
        budget = self._budget(chunks, now)
        budget = self._admit_starved(chunks, preempted, budget, now)
        if not preempted:
            self._admit_shorter(prefills, chunks, budget, now)
        for sequence in prefills:
            if sequence.state is not SequenceState.RUNNING:
                continue
            if decoding and loading.get(sequence.request_id, 0.0) > STALL_BUDGET_S:
                continue  # its KV is still on its way, and those who decode don't wait for it
            budget.wait(loading.get(sequence.request_id, 0.0))
            num_tokens = self._chunk_tokens(budget, sequence.pending_tokens, sequence.computed_tokens)
            if not num_tokens:
                break
            if self._make_room(sequence, num_tokens, chunks, preempted):
                self._count_load(sequence, num_tokens, loading.get(sequence.request_id, 0.0))
                self._spend(sequence, num_tokens, chunks, budget)
        # Room that was just taken from one is not given to another; and who stands first and finds none would be kept
        # out by loads of those behind it, step after step.
        self._lacks_room = bool(preempted) or not self._admit(chunks, budget, now)
        if not self._lacks_room:
            self._admit_ahead(now)
        self._is_full = self.num_waiting > 0
        self._tell_scores()
        self._work, self._began_s = _work_of(chunks), now
        return Schedule(chunks, preempted)

    def ran(self, seconds: float, waited_s: float) -> None:
        """The step that was scheduled last has run. waited_s: of its seconds, those in which it waited for loads."""
        self._ran = seconds, waited_s
        if not self.has_work():
            self._learn(seconds)

    def _learn(self, period_s: float) -> None:
        """From the last step: it cost those who decode all that passed from its start to the next one's."""
        if self._ran is None:
            return
        seconds, waited_s = self._ran
        self._ran = None
        period_s = max(seconds, period_s)
        self._cost.ran(self._work, period_s - waited_s)
        if self._work.decode_rows:
            self._forecast.decoded(period_s, self._work.prefill_tokens)

    # --- the budget ---------------------------------------------------------------------------------------------------

    def _budget(self, decodes: list[Chunk], now: float, stretch: float = 1.0) -> StepBudget:
        """What a step has left for prompts; stretch: how much longer than usual it may be."""
        if self._itl_target_s is None:
            prompts = len(self._running) - len(decodes) + min(self.num_waiting, self.free_places)
            return PricedBudget(
                cost=self._cost,
                decodes=_work_of(decodes),
                prompts=max(1, prompts),
                least_tokens=self._least_chunk_tokens,
                most_tokens=self._lone_step_tokens - len(decodes),
                stretch=stretch,
            )
        if not decodes and not self._tenants.several(now):
            return TokenBudget(self._lone_step_tokens)
        tokens = self._step_tokens - len(decodes)
        if not self._itl_target_s:
            return TokenBudget(tokens)
        target_s = stretch * self._itl_target_s
        return TimeBudget(cost=self._cost, target_s=target_s, decodes=_work_of(decodes), tokens=tokens)

    def _chunk_tokens(self, budget: StepBudget, pending: int, context_len: int) -> int:
        """0: the step is full."""
        num_tokens = budget.chunk(pending, context_len)
        return num_tokens if self._chunked_prefill or not num_tokens else pending

    def _prefills(self, loading: Container[str]) -> list[Sequence]:
        """Running sequences with more than a token to compute: of tenants with the least to do first, with fair places,
        and the shortest first where the queue lets others pass."""
        prefills = [s for s in self._running if len(s.token_ids) - s.computed_tokens > 1 or s.request_id in loading]
        if self._shortest is not None:
            prefills = self._shortest.begin_step(prefills)
        return self._tenants.least_to_do_first(prefills)

    # --- giving way ---------------------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, num_tokens: int, chunks: list[Chunk], preempted: list[Sequence]) -> bool:
        """Reserve rows for a running sequence, preempting later arrivals if need be, in the end itself. False, too, if
        it shall sit out the step, for room that comes by itself."""
        while not self._cache.grow(sequence.request_id, num_tokens):
            if self._ahead.withdraw_last():
                continue
            if self._cache.room_is_coming():
                return False
            victim = self._tenants.to_give_way(self._running)
            self._preempt(victim, chunks, preempted)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, chunks: list[Chunk], preempted: list[Sequence]) -> None:
        self._cache.preempt(victim.request_id)
        victim.preemptions += 1
        self.preemptions += 1
        self.requeue(victim)
        preempted.append(victim)
        chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]

    def requeue(self, sequence: Sequence) -> None:
        """A sequence has lost its room in HBM. One that ran stands first in line again; one that had it before its turn
        keeps its place."""
        if sequence in self._ahead:
            self._ahead.lose(sequence)
            return
        self._stop(sequence)
        sequence.state = SequenceState.WAITING
        sequence.computed_tokens = 0
        self._resumed.appendleft(sequence)

    def _row(self, sequence: Sequence) -> Chunk:
        row = self._rows[sequence] = Chunk(sequence, 1)
        return row

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._rows.pop(sequence, None)
        self._batch_changes += 1
        self._loaders.discard(sequence)
        self._ahead.stopped(sequence)
        self._tenants.stopped(sequence)

    def _starved(self) -> Sequence | None:
        """The next request of a tenant who has nothing running, while another has all places, room or the budget of the
        steps; see `Tenants.starved`."""
        if self._favoured is not None:
            return self._favoured
        if not (self._is_full and len(self._queue)):
            return None
        return self._tenants.starved(self._queue, self._resumed, self.free_places > 0)

    def _admit_starved(
        self, chunks: list[Chunk], preempted: list[Sequence], budget: StepBudget, now: float
    ) -> StepBudget:
        """Returns the budget of what follows."""
        sequence, sat_out, self._sat_out = self._starved(), self._sat_out, frozenset()
        if sequence is None or self._cache.waits_for_sibling(sequence.request_id, is_due=True):
            return budget
        # The margin protects those who decode beside it, once for a request; they are many, and not as urgent.
        budget.is_urgent = True
        aside, beside = self._who_sits_out(sequence, sat_out, chunks, budget, now)
        reserved = self._place(sequence, beside)
        while reserved is None and self._give_way(chunks, preempted):
            # Whoever gives way stays out until it has been of use.
            self._favoured = sequence
            reserved = self._place(sequence, beside)
        if reserved:
            if not self.free_places:
                self._give_way(chunks, preempted)
            if aside and self._cache.stall_s(sequence.request_id) <= STALL_BUDGET_S:
                chunks[:] = [chunk for chunk in chunks if chunk.sequence not in aside]
                self._sat_out, budget = aside, beside
            self._start(sequence, reserved, chunks, budget, now)
        budget.is_urgent = False
        return budget

    def _who_sits_out(
        self, sequence: Sequence, before: Container[Sequence], chunks: list[Chunk], budget: StepBudget, now: float
    ) -> tuple[frozenset[Sequence], StepBudget]:
        """Of tenants with more than one in the batch, those without whom a starved prompt can be ended in this step;
        nobody, if it can be ended beside them or takes another step anyway. Not who did so in the step `before`:
        however many tenants come, an answer goes on in every other step. And the budget without them."""
        aside = frozenset(
            chunk.sequence
            for chunk in chunks
            if self._tenants.has_others_running(chunk.sequence) and chunk.sequence not in before
        )
        computed = sequence.computed_tokens
        if sequence not in self._ahead:
            computed = self._cache.resident_tokens(sequence.request_id)
        pending = len(sequence.token_ids) - computed
        if not aside or not self._chunked_prefill or budget.chunk(pending, computed) >= pending:
            return frozenset(), budget
        left = [chunk for chunk in chunks if chunk.sequence not in aside]
        alone = self._budget(left, now, _STRETCH)
        alone.is_urgent = True
        return (aside, alone) if alone.chunk(pending, computed) >= pending else (frozenset(), budget)

    def _give_way(self, chunks: list[Chunk], preempted: list[Sequence]) -> bool:
        """Preempt one of the tenant with the most running. False if nobody has more than one."""
        if self._tenants.most_running < 2:
            return False
        self._preempt(self._tenants.to_give_way(self._running), chunks, preempted)
        self.fair_preemptions += 1
        return True

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], budget: StepBudget, now: float) -> bool:
        """False: somebody has found no room."""
        skipped: set[Sequence] = set()
        has_room = True
        while self.free_places:
            sequence = self._next(skipped)
            if sequence is None:
                return has_room
            if self._cache.waits_for_sibling(sequence.request_id, is_due=True):
                skipped.add(sequence)  # keeps its place; those behind it may go first
                if sequence is self._favoured:
                    self._favoured = None  # and may have been passed often enough by the time it can go
                continue
            reserved = self._place(sequence, budget)
            if reserved:
                self._start(sequence, reserved, chunks, budget, now)
                continue
            if reserved == 0:
                return has_room
            has_room = False
            if not self._may_be_passed(sequence):
                return has_room
            skipped.add(sequence)
        return has_room

    def _admit_shorter(self, prefills: list[Sequence], chunks: list[Chunk], budget: StepBudget, now: float) -> None:
        """Those next in line who have less to compute than each of those whose prompts are under way."""
        if not prefills or self._shortest is None:
            return
        while self.free_places and (sequence := self._next(set())) is not None:
            computed = sequence.computed_tokens
            if sequence not in self._ahead:
                computed = self._cache.resident_tokens(sequence.request_id)
            if (
                not self._shortest.may_start(len(sequence.token_ids) - computed)
                or self._tenants.has_more_running(sequence, prefills)
                or self._cache.waits_for_sibling(sequence.request_id, is_due=True)
            ):
                return
            reserved = self._place(sequence, budget)
            if not reserved:
                return
            self._start(sequence, reserved, chunks, budget, now)

    def _may_be_passed(self, sequence: Sequence) -> bool:
        """Whether others may start before one for whom there is no room."""
        return self._queue.passes_over and sequence not in self._resumed and sequence is not self._favoured

    def _next(self, skipped: set[Sequence]) -> Sequence | None:
        if self._favoured is not None and self._favoured not in skipped:
            return self._favoured
        return next((s for s in self._resumed if s not in skipped), None) or self._queue.best(skipped)

    def _place(self, sequence: Sequence, budget: StepBudget) -> int | None:
        """Give a waiting sequence its room, or as much more as it needs if it has some. Returns the tokens behind those
        computed that it has room for; 0 if the step is full, None if HBM is: both change nothing but who is ahead."""
        while sequence in self._ahead:
            wanted = self._chunk_tokens(budget, sequence.pending_tokens, sequence.computed_tokens)
            if not wanted or self._cache.grow(sequence.request_id, wanted):
                return wanted
            self._ahead.withdraw_last()
        while True:
            resident = self._cache.resident_tokens(sequence.request_id)
            wanted = self._chunk_tokens(budget, len(sequence.token_ids) - resident, resident)
            if not wanted:
                return 0
            cached = self._cache.admit(sequence.request_id, wanted)
            if cached is not None:
                sequence.computed_tokens = cached
                return wanted + resident - cached
            if not self._ahead.withdraw_last():
                return None

    def _start(self, sequence: Sequence, reserved: int, chunks: list[Chunk], budget: StepBudget, now: float) -> None:
        """A sequence that has its room joins the batch."""
        was_ahead = sequence in self._ahead
        if was_ahead:
            self._ahead.start(sequence, now)
        if sequence is self._favoured:
            self._favoured = None
        if sequence in self._resumed:
            self._resumed.remove(sequence)
        else:
            self._queue.dispatch(sequence)
        sequence.state = SequenceState.RUNNING
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now
            self._forecast.started(sequence)
        self._running.append(sequence)
        self._batch_changes += 1
        self._tenants.started(sequence)
        if self._shortest is not None:
            self._shortest.started(sequence)
        num_tokens = reserved
        if self._chunked_prefill:
            num_tokens = min(reserved, budget.chunk(sequence.pending_tokens, sequence.computed_tokens))
        stall_s = self._cache.stall_s(sequence.request_id)
        if was_ahead or stall_s:
            self._loaders.add(sequence)
        if chunks and stall_s > STALL_BUDGET_S:
            return  # it loads meanwhile, and joins when that is nearly done
        self._count_load(sequence, num_tokens, stall_s)
        self._spend(sequence, num_tokens, chunks, budget)

    def _spend(self, sequence: Sequence, num_tokens: int, chunks: list[Chunk], budget: StepBudget) -> None:
        chunk = Chunk(sequence, num_tokens)
        chunks.append(chunk)
        budget.spend(num_tokens, sequence.computed_tokens, ends=chunk.is_last)
        if self._shortest is not None:
            self._shortest.computes(sequence, num_tokens)

    def _count_load(self, sequence: Sequence, num_tokens: int, stall_s: float) -> None:
        """Its first chunk runs in this step, which may wait for what is left of its load."""
        if sequence not in self._loaders:
            return
        self._loaders.remove(sequence)
        work = StepWork().plus_chunk(num_tokens, sequence.computed_tokens)
        is_hidden = stall_s - self._cost.seconds(work) <= STALL_BUDGET_S
        self.loads["finished" if not stall_s else "hidden" if is_hidden else "exposed"] += 1

    def _tell_scores(self) -> None:
        """Who has come nearer to needing its KV, or gone away from it (CaR §III-B-3)."""
        near = self._queue.near() if self._scoring else None
        if near is None:
            return
        # A preempted request stands before the window, and needs its KV as much as those inside.
        close = [*near, *self._resumed], self._batch_changes
        if close == self._close:
            return
        self._close = close
        scores = dict.fromkeys(close[0], 1)
        scores.update(dict.fromkeys(self._running, 2))
        for sequence, score in scores.items():
            if self._scores.get(sequence) != score:
                self._cache.expect(sequence.request_id, score)
        self._scores = scores

    # --- loading ahead ------------------------------------------------------------------------------------------------

    def _stalls_s(self) -> dict[str, float]:
        """Of those who run and wait for KV, what is left of that."""
        stalls_s = self._cache.stalls_s()
        for sequence in self._ahead:
            stalls_s.pop(sequence.request_id, None)
        return stalls_s

    def _foresee(self, stalls_s: dict[str, float], now: float) -> None:
        """Tell the queue when places will be free, and note what is left of the loads under way."""
        self._loading_s = self._ahead.look(now)
        if self.num_waiting:
            self._loading_s += sum(stalls_s.values())
            self._queue.foresee(self._opens_s(now), self._loading_s)
        self._foreseen = self._batch_changes, len(self._ahead)

    def _opens_s(self, now: float) -> list[float]:
        if self._opens[0] != self._batch_changes:
            self._opens = self._batch_changes, self._forecast.opens_s(self._running, self.free_places)
        return self._opens[1]

    def _begin_forecast(self) -> None:
        """Time has passed."""
        self._opens = -1, []

    def _admit_ahead(self, now: float) -> None:
        """Let the KV of those next in line come while those who run take all places, or all of the step, each as late
        as will do."""
        if not self.num_waiting:
            return
        if self._foreseen != (self._batch_changes, len(self._ahead)):
            self._foresee(self._stalls_s(), now)  # anew: this step's batch is another
        front = list(islice((*self._resumed, *self._queue.once_loaded()), _FRONT))
        known = {sequence for sequence in front if sequence in self._front}
        self._watch(front)
        waiting = []
        for sequence in front:
            if self._cache.waits_for_sibling(sequence.request_id, is_due=False):
                break
            load_s = None if sequence in self._ahead else self._front.load_s(sequence)
            waiting.append(timer.WaitingLoad(sequence.request_id, load_s))
        if all(load.load_s is None for load in waiting):
            return
        due = timer.due(self._opens_s(now), 0, self._loading_s, waiting)
        for sequence in front:
            if sequence.request_id not in due:
                continue
            wanted = len(sequence.token_ids) - self._cache.resident_tokens(sequence.request_id)
            tokens = min(wanted, self._step_tokens) if self._chunked_prefill else wanted
            cached = self._cache.admit(sequence.request_id, tokens)
            if cached is None:
                return
            sequence.computed_tokens = cached
            self._ahead.begin(sequence, now, had_time=sequence in known)

    def _watch(self, front: list[Sequence]) -> None:
        for sequence in [s for s in self._front if s not in front]:
            self._front.forget(sequence)
        self._front.refresh(_FRONT_TOKENS)
        for sequence in front:
            if sequence not in self._front:
                self._front.watch(sequence)


def _work_of(chunks: list[Chunk]) -> StepWork:
    rows = [chunk.sequence.computed_tokens for chunk in chunks if chunk.num_tokens == 1]
    work = StepWork().plus_rows(rows)
    for chunk in chunks:
        if chunk.num_tokens != 1:
            work = work.plus_chunk(chunk.num_tokens, chunk.sequence.computed_tokens)
    return work
