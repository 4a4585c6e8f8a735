"""Simulates the server without a model, a clock or bytes: the real scheduler and cache manager, with tiers and steps
that only take time. A seed decides everything, so a run that breaks an invariant is replayed by its seed.

    python -m reprise.loadgen.virtual.simulation --seeds 10000           random small servers,
                                                               invariants checked in every step
    python -m reprise.loadgen.virtual.simulation --first 1234 --seeds 1  one of them again
"""

import argparse
import heapq
import math
import random
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from reprise.cache.blocks.keys import BLOCK_TOKENS, KeyDomain
from reprise.cache.blocks.truncate import CutRules, reserved
from reprise.cache.manager import CacheManager
from reprise.cache.options import CacheOptions, Truncation
from reprise.cache.policies import POLICIES
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.rates import Rates
from reprise.cache.stats import ResidencyValue
from reprise.cache.tiers.dram import split_dram
from reprise.loadgen.virtual.greedy import greedy
from reprise.loadgen.virtual.virtual_tiers import DIRECTIONS, VirtualSpeeds, VirtualTiers
from reprise.loadgen.workloads.workload import Conversation, ConversationShape, poisson
from reprise.scheduler.budgets.budget import StepCost, StepWork
from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.make_policy import POLICIES as SCHEDULER_POLICIES
from reprise.scheduler.make_policy import make_policy
from reprise.scheduler.policy import Policy
from reprise.scheduler.predictor import LengthPredictor, MaxTokensPredictor, QuantilePredictor
from reprise.scheduler.scheduler import Scheduler
from reprise.scheduler.sequence import Chunk, Sequence, SequenceState

_NO_CUTS = CutRules(allowed=False, keep_first=0, message_starts=(), important=())
_MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class VirtualServer:
    """A description of a server: sizes, settings and the costs of its steps and links."""

    hbm_blocks: int
    dram_blocks: int
    disk_blocks: int
    policy: str
    window: int  # places, of `car`
    max_seqs: int
    patience: float = 8.0  # seconds of waiting for a second of work, with the policy `due`
    target_s: float | None = None  # every turn wants its first token within so many seconds
    step_tokens: int = 512
    lone_step_tokens: int = 2048
    itl_target_s: float | None = 0.0  # None: what serves all of them best
    least_chunk_tokens: int = 32
    chunked_prefill: bool = True
    prefer_contiguous: bool = False  # pages in a row, as the server has them on CPU: it moves who leaves HBM
    oracle: bool = False  # answers are as long as they may be, and the scheduler knows
    cache_policy: str = "lookahead"
    high_water: float = 1.0
    low_water: float = 0.85
    scores: bool = False  # CaR's
    bytes_per_token: int = 1024
    num_layers: int = 12
    fixed_s: float = 0.005
    chunk_fixed_s: float = 0.0  # added to every step with tokens of prompts: products of many rows begin dearer
    s_per_token: float = 0.0004
    s_per_row: float = 0.0005
    s_per_kilo_pair: float = 0.0001
    s_per_kilo_read: float = 0.0001
    misjudged: float = 1.0  # the scheduler's first guess of these five, over the truth
    dram_bytes_per_s: float = 20e6
    disk_bytes_per_s: float = 5e6
    redis_blocks: int = 0  # 0: no Redis
    redis_bytes_per_s: float = 2e6
    coded_share: float = 0.0  # share of its bytes that a coded block takes; 0: nothing is coded
    decoded_bytes_per_s: float = 10e6  # bytes of rows that come out of the codec
    encoded_bytes_per_s: float = 4e6  # bytes of rows that go into it
    load_fixed_s: float = 0.0  # time of every load and fetch beside that of its bytes
    failures: float = 0.0  # share of transfers that fail
    cancels: float = 0.0  # share of steps before which a client goes away
    block_scorer: str = ""  # what a full window drops first; empty: the conversation ends there
    recall: bool = False  # bring back what was dropped where a prompt is about it

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.bytes_per_token

    @property
    def coded_block_bytes(self) -> int:
        """Bytes of a block that the codec has compressed; 0: there is no codec."""
        return int(self.coded_share * self.block_bytes)

    def step_cost(self, *, misjudged: float) -> StepCost:
        """Return the cost of steps as the scheduler is to believe it. misjudged: factor on the true cost."""
        return StepCost(
            fixed_s=misjudged * self.fixed_s,
            s_per_token=misjudged * self.s_per_token,
            s_per_row=misjudged * self.s_per_row,
            s_per_kilo_pair=misjudged * self.s_per_kilo_pair,
            s_per_kilo_read=misjudged * self.s_per_kilo_read,
        )


@dataclass(slots=True)
class VirtualTurn:
    """The outcome of a turn."""

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
    """An invariant does not hold."""


class Simulation:
    """A simulated run. Deterministic: time is virtual, chance comes from `rng`."""

    def __init__(self, *, machine: VirtualServer, conversations: Items[Conversation], rng: random.Random) -> None:
        self.machine = machine
        self.records: list[VirtualTurn] = []
        self.now = 0.0
        self.steps = 0
        self._rng = rng
        self._trace = blake2b(digest_size=8)
        self.tiers = _make_tiers(machine, rng)
        self._rates = _make_rates(machine, self.tiers)
        self.cache = _make_cache(machine, self._rates, arrived=lambda job_id: self.tiers.arrived(job_id, self.now))
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
        self.scheduler = _make_scheduler(machine, self.cache, policy, predictor)
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


def _make_tiers(machine: VirtualServer, rng: random.Random) -> VirtualTiers:
    return VirtualTiers(
        num_layers=machine.num_layers,
        bytes_per_token=machine.bytes_per_token,
        coded_block_bytes=machine.coded_block_bytes,
        redis_blocks=machine.redis_blocks,
        speeds=VirtualSpeeds(
            dram_bytes_per_s=machine.dram_bytes_per_s,
            disk_bytes_per_s=machine.disk_bytes_per_s,
            redis_bytes_per_s=machine.redis_bytes_per_s,
            decoded_bytes_per_s=machine.decoded_bytes_per_s,
            encoded_bytes_per_s=machine.encoded_bytes_per_s,
            load_fixed_s=machine.load_fixed_s,
        ),
        failures=machine.failures,
        rng=rng,
    )


def _make_rates(machine: VirtualServer, tiers: VirtualTiers) -> Rates:
    return Rates(
        num_layers=machine.num_layers,
        step_fixed_s=machine.fixed_s,
        prefill_s_per_token=machine.s_per_token,
        transfer_fixed_s=machine.load_fixed_s,
        bytes_per_s={name: tiers.speed(name) for name in DIRECTIONS},
    )


def _make_cache(machine: VirtualServer, rates: Rates, *, arrived: Callable[[int], float]) -> CacheManager:
    """Make the cache manager of a machine. arrived: see CacheManager."""
    dram_bytes = machine.dram_blocks * machine.block_bytes
    dram_slots, coded_slots = split_dram(dram_bytes, machine.block_bytes, machine.coded_block_bytes)
    return CacheManager(
        options=CacheOptions(
            num_pages=machine.hbm_blocks,
            page_size=BLOCK_TOKENS,
            bytes_per_token=machine.bytes_per_token,
            hbm_bytes_per_token=None,
            most_pages=0,
            prefer_contiguous=machine.prefer_contiguous,
            num_slots=dram_slots + machine.dram_blocks // 4,
            dram_slots=dram_slots,
            coded_block_bytes=machine.coded_block_bytes,
            coded_slots=coded_slots,
            disk_bytes=machine.disk_blocks * machine.block_bytes,
            redis_bytes=machine.redis_blocks * machine.block_bytes,
            head_key=b"virtual" if machine.redis_blocks else b"",
            hbm_high_water=machine.high_water,
            hbm_low_water=machine.low_water,
            dram_free_buffer=0.1,
            reuse=True,
            only_as_computed=False,
            truncation=Truncation(
                machine.hbm_blocks * BLOCK_TOKENS, 0.5, "decoupled", machine.block_scorer or "oldest", machine.recall
            ),
            session_ttl_s=1e9,
            max_sessions=1_000_000,
            unix_offset_s=0.0,
        ),
        policy=POLICIES[machine.cache_policy],
        domain_of=lambda tenant, salt: KeyDomain(secret=b"", fingerprint=b"", tenant=tenant, salt=salt),
        rates=rates,
        arrived=arrived,
        progress=lambda job_id: None,  # its disks never stutter
    )


def _make_scheduler(
    machine: VirtualServer, cache: CacheManager, policy: Policy, predictor: LengthPredictor
) -> Scheduler:
    return Scheduler(
        cache=cache.view,
        policy=policy,
        predictor=predictor,
        cost=machine.step_cost(misjudged=machine.misjudged),
        limits=SchedulerLimits(
            max_seqs=machine.max_seqs,
            max_queued=1_000_000,
            step_tokens=machine.step_tokens,
            lone_step_tokens=machine.lone_step_tokens,
            itl_target_s=machine.itl_target_s,
            least_chunk_tokens=machine.least_chunk_tokens,
            chunked_prefill=machine.chunked_prefill,
        ),
    )


def random_case(seed: int) -> Simulation:
    """Return a simulation of a small server under some load, all of it drawn from the seed."""
    rng = random.Random(seed)
    machine = VirtualServer(
        hbm_blocks=rng.randint(8, 40),
        dram_blocks=rng.choice([0, 6, 20, 60]),
        disk_blocks=rng.choice([0, 0, 40, 400]),
        policy=rng.choice(["due", "due", *SCHEDULER_POLICIES]),
        window=rng.randint(1, 6),
        max_seqs=rng.choice([1, 1, 2, 3, 5]),
        step_tokens=rng.choice([16, 64, 256]),
        lone_step_tokens=rng.choice([64, 256, 512]),
        itl_target_s=rng.choice([0.0, 0.02, 0.1, None, None]),
        chunked_prefill=rng.random() < 0.8,
        oracle=rng.random() < 0.3,
        cache_policy=rng.choice(["lookahead", "lookahead", "lru"]),
        high_water=rng.choice([0.5, 0.9, 1.0]),
        scores=rng.random() < 0.5,
        low_water=0.5,
        s_per_token=rng.choice([0.0001, 0.01, 0.1]),
        dram_bytes_per_s=rng.choice([1e5, 1e6, 1e7]),
        disk_bytes_per_s=rng.choice([5e4, 1e6]),
        failures=rng.choice([0.0, 0.1, 0.3]),
        cancels=rng.choice([0.0, 0.0, 0.02]),
        prefer_contiguous=rng.random() < 0.5,
        redis_blocks=random.Random(f"redis {seed}").choice([0, 0, 40, 400]),
        coded_share=random.Random(f"coded {seed}").choice([0.0, 0.0, 0.25]),
        block_scorer=random.Random(f"cuts {seed}").choice(["", "", *BLOCK_SCORERS]),
        recall=random.Random(f"recall {seed}").random() < 0.5,
    )
    shape = ConversationShape(
        turns=4, prompt_tokens=40, answer_tokens=8, think_s=rng.choice([0.0, 0.1, 1.0]), spread=0.7
    )
    conversations = poisson(
        rng=rng, count=rng.randint(1, 7), rate_per_s=rng.choice([1.0, 10.0, 1000.0]), shape=shape, tenants=("a", "b")
    )
    return Simulation(machine=machine, conversations=conversations, rng=rng)


def main(arguments: Items[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    options = parser.parse_args(arguments)
    began_s, steps, broken = time.monotonic(), 0, 0
    for seed in range(options.first, options.first + options.seeds):
        case = random_case(seed)
        try:
            case.run()
        except (BrokenInvariant, AssertionError, KeyError, IndexError, ValueError) as error:
            broken += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
        steps += case.steps
    seconds = time.monotonic() - began_s
    print(f"{options.seeds} seeds, {steps} steps, {broken} broken, {seconds:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
