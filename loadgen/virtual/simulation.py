"""Simulates the server without a model, a clock or bytes: the real scheduler and cache manager, with tiers and steps
that only take time. `random_servers` plays it with many seeds.
"""

import heapq
import math
import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import CutRules, reserved
from reprise.cache.stats import ResidencyValue
from reprise.loadgen.virtual.greedy import greedy
from reprise.loadgen.virtual.virtual_server import VirtualServer, make_cache, make_rates, make_scheduler, make_tiers
from reprise.loadgen.workloads.workload import Conversation
from reprise.scheduler.budgets.budget import StepWork
from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.make_policy import make_policy
from reprise.scheduler.predictor import LengthPredictor, MaxTokensPredictor, QuantilePredictor
from reprise.scheduler.sequence import Chunk, Sequence, SequenceState

_NO_CUTS = CutRules(allowed=False, keep_first=0, message_starts=(), important=())
_MOST_STEPS = 100_000


@dataclass(slots=True)
class VirtualTurn:
    """The record of a simulated turn: its times, and how many tokens of its prompt were cached."""

    session_id: str
    tenant: str
    arrived_s: float
    first_token_s: float | None = None
    done_s: float | None = None
    started_s: float | None = None
    residency: ResidencyValue | None = None  # as it came
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(slots=True)
class _Live:
    """A conversation as its client sees it."""

    conversation: Conversation
    tokens: list[int] = field(default_factory=list)  # all that was said
    turn: int = 0
    record: VirtualTurn | None = None


class BrokenInvariant(Exception):
    """An invariant of the scheduler or the cache does not hold. The message says which."""


class Simulation:
    """A simulated run. Deterministic: time is virtual, chance comes from `rng`."""

    def __init__(self, *, machine: VirtualServer, conversations: Items[Conversation], rng: random.Random) -> None:
        self.machine = machine
        self.records: list[VirtualTurn] = []
        self.now = 0.0
        self.steps = 0
        self._rng = rng
        self._trace = blake2b(digest_size=8)
        self.tiers = make_tiers(machine, rng)
        self._rates = make_rates(machine, self.tiers)
        self.cache = make_cache(machine, self._rates, arrived=lambda job_id: self.tiers.arrived(job_id, self.now))
        predictor: LengthPredictor = MaxTokensPredictor() if machine.oracle else QuantilePredictor(quantile=0.5)
        policy = make_policy(
            machine.policy,
            cache=self.cache.view,
            predictor=predictor,
            window=machine.window,
            patience=machine.patience,
            scores=machine.scores,
        )
        self._queue = policy.queue
        self._truth = machine.step_cost(misjudged=1.0)
        self.scheduler = make_scheduler(machine, self.cache, policy, predictor)
        self._arrivals: list[tuple[float, int, _Live]] = []  # a heap
        self._pushed = 0
        self._live: dict[str, tuple[Sequence, _Live]] = {}
        self._requests = 0
        for conversation in conversations:
            self._push_turn(conversation.start_s, _Live(conversation))

    @property
    def digest(self) -> str:
        """A digest of everything that was scheduled, and when."""
        return self._trace.hexdigest()

    def run(self) -> None:
        """Run to the end of all conversations. Raises BrokenInvariant."""
        while self._arrivals or self._live:
            if self.steps > _MOST_STEPS:
                raise BrokenInvariant(f"{len(self._live)} requests do not come to an end")
            self._step()
        self._settle()
        self._check(self.cache.num_leases == 0, "pages are pinned at idle")
        self._check(self.cache.in_flight == 0, "transfers are under way at idle")
        is_needed = any(row.score for row in self.cache.tiers.table)
        self._check(not is_needed, "a block is needed by nobody, and has a score")

    # --- a step, as the engine takes it -------------------------------------------------------------------------------

    def _step(self) -> None:
        self.steps += 1
        self._hear()
        self._requeue_failed()
        while self._arrivals and self._arrivals[0][0] <= self.now:
            self._arrive(heapq.heappop(self._arrivals)[2])
        if self._live and self._rng.random() < self.machine.cancels:
            self._cancel(self._rng.choice(sorted(self._live)))
        upcoming = self.scheduler.upcoming()
        self.cache.plan(upcoming, self.scheduler.num_starting, self.now)
        self.tiers.carry_out(self.cache.take_moves(), self.now)
        waiting = upcoming.members
        self._check(len(set(waiting)) == len(waiting) == self.scheduler.num_waiting, "the order lies about who waits")
        fresh = {s.request_id for s, _ in self._live.values() if s.scheduled_s is None}
        schedule = self.scheduler.schedule(self.now)
        self.tiers.carry_out(self.cache.take_moves(), self.now)
        started = fresh - {s.request_id for s, _ in self._live.values() if s.scheduled_s is None}
        self._trace.update(repr((self.now, [(c.sequence.request_id, c.num_tokens) for c in schedule.chunks])).encode())
        self._check_invariants(started)
        if not schedule.chunks:
            self._wait(bool(schedule.preempted))
            return
        self._forward(schedule.chunks)

    def _forward(self, chunks: list[Chunk]) -> None:
        work = StepWork()
        for chunk in chunks:
            context = chunk.sequence.computed_tokens
            work = work.plus_rows([context]) if chunk.num_tokens == 1 else work.plus_chunk(chunk.num_tokens, context)
        seconds = self._truth.seconds(work) + (self.machine.chunk_fixed_s if work.prefill_tokens else 0.0)
        jobs = [load.job for c in chunks if (load := self.cache.requests.context(c.sequence.request_id).load)]
        loaded_s = max(map(self.tiers.loaded_s, jobs), default=0.0)
        # Layer by layer: the last layer's computation follows the last layer's arrival.
        end_s = max(self.now + seconds, loaded_s + seconds / self.machine.num_layers)
        waited_s = end_s - self.now - seconds
        self.now = end_s
        self._hear()
        failed = self._requeue_failed()
        row = saved_rows = 0
        for chunk in chunks:
            request_id = chunk.sequence.request_id
            if request_id not in failed:
                pieces = self.cache.requests.capture(request_id, chunk.num_tokens, row)
                saved_rows += sum(piece.num_rows for piece in pieces)
            row += chunk.num_tokens
        self.tiers.save(saved_rows, self.now)
        self.tiers.carry_out(self.cache.take_moves(), self.now)
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.request_id in failed:
                continue
            is_last = chunk.is_last
            self.cache.requests.commit(sequence.request_id, chunk.num_tokens)
            if self.machine.block_scorer == "attended" and chunk.num_tokens > 1:
                self.cache.requests.attended(sequence.request_id, self._attention(sequence))
            sequence.computed_tokens += chunk.num_tokens
            if is_last:
                self._sample(sequence)
        self._rates.computed(work.prefill_tokens + work.decode_rows, seconds)
        self.scheduler.ran(seconds + waited_s, waited_s)

    def _attention(self, sequence: Sequence) -> list[float]:
        """Return an invented share of attention for each block of a sequence, which sums to 1: it grows with the id of
        the block's first token."""
        tokens = self.cache.requests.context(sequence.request_id).token_ids[::BLOCK_TOKENS]
        return [(token + 1) / (sum(tokens) + len(tokens)) for token in tokens]

    def _sample(self, sequence: Sequence) -> None:
        _, live = self._live[sequence.request_id]
        assert live.record is not None
        sequence.token_ids.append(self._rng.randrange(1000))
        live.record.token_s.append(self.now)
        if sequence.first_token_s is None:
            sequence.first_token_s = live.record.first_token_s = self.now
            live.record.started_s = sequence.scheduled_s
            live.record.cached_tokens = self.cache.requests.report(sequence.request_id).cached_tokens
        if sequence.output_tokens == sequence.sampling.max_tokens:
            live.record.done_s = self.now
            self.scheduler.completed(sequence)
            live.tokens = self.cache.requests.context(sequence.request_id).conversation
            self._close(sequence, sequence.computed_tokens)
            live.turn += 1
            if live.turn < len(live.conversation.turns):
                self._push_turn(self.now, live)

    def _arrive(self, live: _Live) -> None:
        turn = live.conversation.turns[live.turn]
        window, rules, reserve = self.machine.hbm_blocks * BLOCK_TOKENS, _NO_CUTS, 1
        prompt = live.tokens + self._rng.choices(range(1000), k=turn.prompt_tokens)
        if self.machine.block_scorer:
            prompt = live.tokens + prompt[len(live.tokens) :][: window // 2]
            rules = replace(_NO_CUTS, allowed=True, message_starts=(len(live.tokens),))
            reserve = reserved(turn.answer_tokens, window)
            answer = min(turn.answer_tokens, reserve)
        else:
            prompt = prompt[: max(1, window - turn.answer_tokens)]
            answer = min(turn.answer_tokens, window - len(prompt))
        if answer <= 0:
            return  # the window is full: the conversation ends
        self._requests += 1
        request_id = f"{self._requests:05}"
        conversation = live.conversation
        tokens = self.cache.requests.open(
            request_id, conversation.tenant, "", conversation.session_id, prompt, rules, reserve, None, self.now
        )
        sequence = Sequence(
            request_id=request_id,
            tenant=conversation.tenant,
            session_id=conversation.session_id,
            sampling=greedy(answer),
            arrived_s=self.now,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            target_s=self.machine.target_s,
        )
        live.record = VirtualTurn(
            conversation.session_id,
            conversation.tenant,
            self.now,
            residency=self.cache.view.residency(request_id),
            prompt_tokens=len(tokens),
        )
        self.records.append(live.record)
        self._live[request_id] = sequence, live
        self.scheduler.add(sequence)

    def _cancel(self, request_id: str) -> None:
        sequence, _ = self._live[request_id]
        self._close(sequence, sequence.computed_tokens)

    def _close(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduler.remove(sequence)
        self.cache.requests.close(sequence.request_id, num_tokens, self.now)
        del self._live[sequence.request_id]

    def _requeue_failed(self) -> set[str]:
        failed = set(self.cache.requests.take_failed())
        for request_id in sorted(failed):
            sequence = self._live[request_id][0]
            sequence.dropped_tokens += self.cache.requests.void(request_id)
            self.scheduler.requeue(sequence)
        return failed

    # --- time ---------------------------------------------------------------------------------------------------------

    def _push_turn(self, before_s: float, live: _Live) -> None:
        """Send a conversation's next turn, after the one that ended at `before_s`."""
        turn = live.conversation.turns[live.turn]
        self._pushed += 1
        heapq.heappush(self._arrivals, (max(before_s + turn.think_s, turn.due_s), self._pushed, live))

    def _hear(self) -> None:
        for event in self.tiers.take_events(self.now):
            self.cache.on_event(event, self.now)
        self.cache.sessions.take_heads()  # they are for a fleet, and here is none

    def _wait(self, preempted: bool) -> None:
        """Advance the clock to the next event, because nothing can run."""
        when_s = min(self.tiers.next_event_s, self._arrivals[0][0] if self._arrivals else math.inf)
        if when_s < math.inf:
            self.now = max(self.now, when_s)
        elif not preempted and self._live:
            raise BrokenInvariant("nothing runs, and nothing is on its way")

    def _settle(self) -> None:
        for _ in range(1000):
            self.cache.plan(self.scheduler.upcoming(), 0, self.now)
            self.tiers.carry_out(self.cache.take_moves(), self.now)
            if self.tiers.last_event_s is None:
                return
            self.now = self.tiers.last_event_s
            self._hear()
        raise BrokenInvariant("the transfers do not come to an end")

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenInvariant(f"{what} (step {self.steps}, {self.now:.3f} s)")

    def _check_invariants(self, started: set[str]) -> None:
        gauges, dram = self.cache.gauges(), self.cache.tiers.dram
        total = gauges.hbm_pages_free + gauges.hbm_pages_cached + gauges.leases
        self._check(total == gauges.hbm_pages_total, "a page is lost")
        self._check(0 <= dram.rows.resident <= dram.rows.num_slots, "DRAM holds more than there is")
        self._check(0 <= dram.coded.resident <= dram.coded.num_slots, "DRAM holds too many coded blocks")
        self._check(gauges.tier_bytes["disk"] <= gauges.tier_capacity["disk"], "the disk holds more than it may")
        self._check(len(self.scheduler.running) <= self.machine.max_seqs, "more run than may")
        for sequence, _ in self._live.values():
            context = self.cache.requests.context(sequence.request_id)
            if sequence.state is SequenceState.RUNNING:
                self._check(bool(context.rows.pages), "somebody runs without pages")
                self._check(context.rows.computed == sequence.computed_tokens, "scheduler and cache disagree")
            elif context.rows.pages:
                self._check(self.scheduler.has_early_load(sequence), "somebody waits with pages, and not for its load")
        if isinstance(self._queue, ShuffledWindow):
            inside, size = self._queue.inside, self.machine.window
            self._check(len(inside) <= size, "the window is too full")
            self._check(all(count < size for count in inside.values()), "somebody was overtaken too often")
        self._check(all(name in self._live for name in started), "somebody started who is not there")
