"""Legs of `benchmarks.scheduling.compare`: turns of many conversations that arrive at random, played on one server, and
what became of each."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.measures import HEARTBEAT_S, fail_on, mean_of, target_of
from benchmarks.harness.servers import ServerProcess
from reprise.loadgen.measure.sender import Messages, TurnResult, run
from reprise.loadgen.workloads.workload import Conversation, Turn

TIERS = ("hbm", "dram", "disk", "computed")
BLOCK = 32
GIB = 1 << 30
TTFT_S, ITL_S = 1.0, 0.1  # the SLO
TEMPLATE_TOKENS = 16  # at most, around a message
BEGIN_ANSWER = 1  # tokens: conversations are begun to be returned to
WARM_UP, WARM_UP_TOKENS = 6, 200  # conversations, and what they begin with
AT_ONCE = 8  # deletions
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload."""

    conversations: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    turns: int  # of a conversation in a leg, in the mean

    @property
    def growth_tokens(self) -> int:
        return self.turn_tokens + self.answer_tokens + TEMPLATE_TOKENS

    @property
    def begun_tokens(self) -> int:
        """Tokens of a conversation before a leg."""
        return self.first_tokens + BEGIN_ANSWER + TEMPLATE_TOKENS

    @property
    def mean_history(self) -> int:
        """Tokens of history before a turn in a leg."""
        return self.begun_tokens + (self.turns - 1) * self.growth_tokens // 2

    @property
    def mean_tokens(self) -> int:
        """Tokens of a conversation after a turn."""
        return -(-(self.mean_history + self.growth_tokens) // BLOCK) * BLOCK

    @property
    def most_turns(self) -> int:
        """The most turns that a conversation has in a leg."""
        return 2 * self.turns

    @property
    def final_tokens(self) -> int:
        """The most tokens that a conversation comes to."""
        tokens = self.begun_tokens + self.most_turns * self.growth_tokens
        return -(-tokens // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn."""

    policy: str
    share: float
    round_: int
    ttft_s: float | None  # None: it failed
    gaps_s: tuple[float, ...]
    queue_s: float
    tier_class: int
    loaded: bool  # at least a part of its history
    error: str | None
    tokens: dict[str, int]  # of the prompt, by tier, or "computed"
    missed: dict[str, int]  # reason -> computed tokens
    session: str
    due_s: float  # since the leg began
    load_wait_s: float  # in which its steps waited for KV
    prefill_s: float  # from its first step to its first token, without that

    @property
    def is_good(self) -> bool:
        return self.ttft_s is not None and self.ttft_s <= TTFT_S and mean_of(self.gaps_s) <= ITL_S

    @property
    def is_strictly_good(self) -> bool:
        return self.ttft_s is not None and self.ttft_s <= TTFT_S and max(self.gaps_s, default=0.0) <= ITL_S


@dataclass(slots=True)
class Leg:
    """What a server did at one rate in one round."""

    policy: str
    share: float
    round_: int
    rate: float  # offered, turns a second
    pace: float  # of the machine just before, in units of the calibration's
    seconds: float  # from the first arrival to the last token
    counts: Counter[str]  # what the scheduler counted meanwhile
    load_s: float
    load_wait_s: float  # of it, in which a step waited
    samples: list[Sample] = field(default_factory=list)


def settings_of(
    policy: str, model: str, shape: Shape, in_hbm: int, in_dram: int, window: int, gbps: float, directory: Path
) -> dict[str, Any]:
    size, most = shape.mean_tokens, shape.final_tokens + 2 * BLOCK
    return {
        "model.source": model,
        "model.dtype": "bfloat16",
        "model.max_context": most,
        "cache.hbm_tokens": max(in_hbm * size, most) + BLOCK,
        "cache.dram_gib": in_dram * size * kv_bytes_per_token(model) / GIB,
        "experiment.disk_gbps": gbps,
        "cache.disk_dir": directory,
        "scheduler.policy": policy.removesuffix("-again"),
        "experiment.window": window,
        # One place of HBM is left for KV that comes while all others run.
        "scheduler.max_seqs": max(1, in_hbm - 1),
    }


def arrivals(shape: Shape, rate: float, seed: str, prefix: str) -> list[Conversation]:
    """Turns of conversations chosen at random, at the times of a Poisson process."""
    rng = random.Random(seed)
    due_s = 0.0
    dues: list[list[float]] = [[] for _ in range(shape.conversations)]
    for _ in range(shape.turns * shape.conversations):
        due_s += rng.expovariate(rate)
        rng.choice([times for times in dues if len(times) < shape.most_turns]).append(due_s)
    return [
        Conversation(f"{prefix}-{number}", "", 0.0, tuple(turn_of(shape, due_s) for due_s in times))
        for number, times in enumerate(dues)
        if times
    ]


def turn_of(shape: Shape, due_s: float) -> Turn:
    return Turn(shape.turn_tokens, shape.answer_tokens, 0.0, due_s=due_s)


def together(shape: Shape, prompt_tokens: int, answer_tokens: int, prefix: str) -> list[Conversation]:
    """A turn of every conversation at once."""
    turn = Turn(prompt_tokens, answer_tokens, 0.0)
    return [Conversation(f"{prefix}-{number}", "", 0.0, (turn,)) for number in range(shape.conversations)]


class Player:
    """One server and what was said on it."""

    def __init__(self, server: ServerProcess, policy: str, shape: Shape) -> None:
        self.server, self._policy, self._shape = server, policy, shape
        self._histories: dict[str, Messages] = {}

    def play(self, conversations: Sequence[Conversation], seed: int) -> list[TurnResult]:
        return asyncio.run(
            run(target_of(self.server), conversations, seed=seed, timeout_s=TIMEOUT_S, histories=self._histories)
        )

    def begin(self, prefix: str, seed: int) -> float:
        """All conversations at once. Returns in how many seconds: the machine's pace right now. Raises RuntimeError if
        one fails."""
        results = self.play(together(self._shape, self._shape.first_tokens, BEGIN_ANSWER, prefix), seed)
        fail_on(results)
        return max(result.done_s for result in results) - min(result.sent_s for result in results)

    def warm_up(self) -> None:
        """Everything once that a server sets up at its first use."""
        some = together(self._shape, WARM_UP_TOKENS, self._shape.answer_tokens, "warm-up")[:WARM_UP]
        for seed in range(2):
            fail_on(self.play(some, seed))
        self.forget()

    def forget(self) -> None:
        """Delete everything."""
        self._histories.clear()
        with httpx.Client(base_url=self.server.url, timeout=60) as http, ThreadPoolExecutor(AT_ONCE) as threads:

            def delete(session: dict[str, Any]) -> None:
                http.delete(f"/v1/sessions/{session['id']}").raise_for_status()

            while sessions := http.get("/v1/sessions").raise_for_status().json()["data"]:
                list(threads.map(delete, sessions))

    def rest(self) -> dict[str, float]:
        """Wait until nothing is under way, by the engine's next reports. Returns its metrics. Raises RuntimeError if
        that takes too long."""
        for _ in range(int(TIMEOUT_S / HEARTBEAT_S)):
            time.sleep(HEARTBEAT_S)
            metrics = self.server.metrics()
            if not metrics["reprise_in_flight_transfers"] and not metrics["reprise_running_requests"]:
                return metrics
        raise RuntimeError(f"{self._policy}: transfers do not come to an end")

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.server.url}/v1/scheduler", timeout=10).raise_for_status().json()
        return answer

    def counts(self) -> Counter[str]:
        state = self.state()
        counts = Counter({f"loads {name}": n for name, n in state["loads"].items()})
        counts.update({f"timer {name}": n for name, n in state["timer"].items()})
        counts.update({name: state[name] for name in ("overtakes", "preemptions", "fair_preemptions")})
        return counts

    def leg(self, share: float, rate: float, pace: float, round_: int, prefix: str, seed: int) -> Leg:
        conversations = arrivals(self._shape, rate, f"{seed} {share}", prefix)
        before, counted = self.rest(), self.counts()
        results = self.play(conversations, seed)
        after, counts = self.rest(), self.counts()
        counts.subtract(counted)
        names = ("reprise_kv_load_seconds_total", "reprise_kv_load_wait_seconds_total")
        load_s, wait_s = (after[name] - before[name] for name in names)
        seconds = max(r.done_s for r in results) - min(r.due_s for r in results)
        samples = [sample_of(result, self._policy, share, round_) for result in results]
        # A conversation ends at its first error: what it did not send is lost as well.
        lost = sum(len(c.turns) for c in conversations) - len(results)
        samples += [not_sent(self._policy, share, round_)] * lost
        return Leg(self._policy, share, round_, rate, pace, seconds, counts, load_s, wait_s, samples)


def sample_of(result: TurnResult, policy: str, share: float, round_: int) -> Sample:
    cache, timings = result.extra.get("x_cache", {}), result.extra.get("timings", {})
    in_hbm, below = cache.get("hbm_tokens", 0), cache.get("dram_tokens", 0) + cache.get("disk_tokens", 0)
    tier_class = 2 if in_hbm + below == 0 else 1 if in_hbm >= below else 3
    late_s = max(0.0, result.sent_s - result.due_s)
    return Sample(
        policy, share, round_, result.ttft_s if result.error is None else None, tuple(result.gaps_s),
        late_s + timings.get("queue_ms", 0.0) / 1e3, tier_class, below > 0, result.error,
        {tier: cache.get(f"{tier}_tokens", 0) for tier in TIERS}, dict(cache.get("miss_reasons") or {}),
        result.session_id, result.due_s, timings.get("load_ms", 0.0) / 1e3, timings.get("prefill_ms", 0.0) / 1e3,
    )  # fmt: skip


def not_sent(policy: str, share: float, round_: int) -> Sample:
    return Sample(policy, share, round_, None, (), 0.0, 2, False, "not sent", {}, {}, "", 0.0, 0.0, 0.0)
