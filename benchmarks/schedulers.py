"""Time to first token under load, by who starts next: CaR's shuffled window against a priority queue and FCFS.

    python -m benchmarks.schedulers

Twenty-four conversations of a random 125 M-shape model in bf16, begun with 1,000 tokens each, return with 150 new
tokens and get answers of 32. HBM and DRAM together hold a third of them at their mean length; the rest is on a disk
throttled so far that loading a mean history takes as long as computing the new tokens of its turn: both are measured in
the run. Turns arrive by a Poisson process at three rates, given as shares of the rate at which the FCFS server works
off a burst. Each is a turn of a conversation chosen at random: one returns twice in a leg in the mean, four times at
most, and not before its last answer has ended.

The three servers differ in `scheduler.policy` alone. They take turns leg by leg in an order that moves on, with the
same arrivals and the same prompts, and only one works at a time. A round is a leg at each rate on each server; what it
has left is deleted before the next, in which the rates follow each other in another order. The result is written after
every round.

A turn waits from when it was due to its first step (`queue_ms`). Its class is told by where most of its history was
when it started, for no answer names the one by which it was ordered: 1 in HBM, 2 nowhere, 3 below. A load is finished
when its request starts after it, hidden when it ends behind the computation of those who run; a turn whose answer says
that it loaded, and whose load the scheduler did not count, counts as neither. Goodput: turns a second that had their
first token within 1 s and then a mean gap of at most 100 ms; the strict one wants every gap within it.

Expected of `car`: at least 95 % of loads finished or hidden; at the highest rate a TTFT p95 of at most 0.8 x FCFS, at
the lower ones never above 1.05 x.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.in_process import kv_bytes_per_token
from benchmarks.make_model import SHAPES, make_model
from benchmarks.servers import Server, serve, write_result
from loadgen.client import Messages, Target, TurnResult, run
from loadgen.workload import Conversation, Turn

POLICIES = ("car", "priority", "fcfs")
TIERS = ("hbm", "dram", "disk", "computed")
SHARES = (0.5, 0.75, 0.95)  # of the service rate
BLOCK = 32
GIB = 1 << 30
TTFT_S, ITL_S = 1.0, 0.1  # the SLO
MIN_HIDDEN = 0.95
NEAR_SATURATION, BELOW = 0.8, 1.05  # most TTFT p95 in units of FCFS
HEARTBEAT_S = 1.3  # the scheduler's state is as old as the last one
TEMPLATE_TOKENS = 16  # at most, around a message
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the workload."""

    conversations: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    turns: int  # of a conversation in a leg, in the mean
    shares: tuple[float, ...]

    @property
    def growth_tokens(self) -> int:
        return self.turn_tokens + self.answer_tokens + TEMPLATE_TOKENS

    @property
    def begun_tokens(self) -> int:
        """Of a conversation before the first leg."""
        return self.first_tokens + self.answer_tokens + TEMPLATE_TOKENS

    @property
    def mean_history(self) -> int:
        """Of a turn in a leg."""
        return self.begun_tokens + (len(self.shares) * self.turns - 1) * self.growth_tokens // 2

    @property
    def mean_tokens(self) -> int:
        """Of a conversation behind a turn."""
        return -(-(self.mean_history + self.growth_tokens) // BLOCK) * BLOCK

    @property
    def most_turns(self) -> int:
        """Of a conversation in a leg."""
        return 2 * self.turns

    @property
    def final_tokens(self) -> int:
        """At most."""
        tokens = self.begun_tokens + len(self.shares) * self.most_turns * self.growth_tokens
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
    seconds: float  # from the first arrival to the last token
    counts: Counter[str]  # what the scheduler counted meanwhile
    load_s: float
    load_wait_s: float  # of it, in which a step waited
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Calibration:
    prefill_s: float  # of a turn's new tokens behind a mean history in HBM, nobody else running
    disk_gbps: float
    load_s: float  # of a mean history from the throttled disk, as measured
    service_rate: float  # turns a second
    window: int  # places


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1e6) * len(ordered) // 1_000_000) - 1)] if ordered else float("nan")


# --- playing ----------------------------------------------------------------------------------------------------------


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
        "cache.disk_gbps": gbps,
        "cache.disk_dir": directory,
        "scheduler.policy": policy,
        "scheduler.window": window,
        # One place of HBM is left for KV that comes while all others run.
        "scheduler.max_seqs": max(1, in_hbm - 1),
    }


def target_of(server: Server) -> Target:
    return Target(server.url, server.model["id"], {}, {"temperature": 0, "ignore_eos": True})


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


def together(shape: Shape, prompt_tokens: int, prefix: str) -> list[Conversation]:
    """A turn of every conversation at once."""
    turn = Turn(prompt_tokens, shape.answer_tokens, 0.0)
    return [Conversation(f"{prefix}-{number}", "", 0.0, (turn,)) for number in range(shape.conversations)]


class Player:
    """One server and what was said on it."""

    def __init__(self, server: Server, policy: str, shape: Shape) -> None:
        self.server, self._policy, self._shape = server, policy, shape
        self._histories: dict[str, Messages] = {}

    def play(self, conversations: Sequence[Conversation], seed: int) -> list[TurnResult]:
        return asyncio.run(
            run(target_of(self.server), conversations, seed=seed, timeout_s=TIMEOUT_S, histories=self._histories)
        )

    def begin(self, prefix: str, seed: int) -> None:
        """All conversations, whose KV comes to rest. Raises RuntimeError if one fails."""
        fail_on(self.play(together(self._shape, self._shape.first_tokens, prefix), seed))
        self.rest()

    def forget(self) -> None:
        """Delete everything."""
        self._histories.clear()
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            while sessions := http.get("/v1/sessions").raise_for_status().json()["data"]:
                for session in sessions:
                    http.delete(f"/v1/sessions/{session['id']}").raise_for_status()

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

    def leg(self, share: float, rate: float, round_: int, prefix: str, seed: int) -> Leg:
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
        samples += [Sample(self._policy, share, round_, None, (), 0.0, 2, False, "not sent", {}, {})] * lost
        return Leg(self._policy, share, round_, rate, seconds, counts, load_s, wait_s, samples)


def sample_of(result: TurnResult, policy: str, share: float, round_: int) -> Sample:
    cache, timings = result.extra.get("x_cache", {}), result.extra.get("timings", {})
    in_hbm, below = cache.get("hbm_tokens", 0), cache.get("dram_tokens", 0) + cache.get("disk_tokens", 0)
    tier_class = 2 if in_hbm + below == 0 else 1 if in_hbm >= below else 3
    late_s = max(0.0, result.sent_s - result.due_s)
    return Sample(
        policy, share, round_, result.ttft_s if result.error is None else None, tuple(result.gaps_s),
        late_s + timings.get("queue_ms", 0.0) / 1e3, tier_class, below > 0, result.error,
        {tier: cache.get(f"{tier}_tokens", 0) for tier in TIERS}, dict(cache.get("miss_reasons") or {}),
    )  # fmt: skip


def fail_on(results: Sequence[TurnResult]) -> None:
    errors = [result.error for result in results if result.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} turns failed, the first with {errors[0]}")


# --- calibration ------------------------------------------------------------------------------------------------------


def prefill_seconds(model: str, shape: Shape, directory: Path) -> float:
    """Of a turn's new tokens behind a mean history in HBM, alone on a server of its own; the median of some."""
    settings = settings_of("fcfs", model, shape, 3, 0, 0, 0.0, directory)
    with serve("probe", settings) as server:
        player = Player(server, "fcfs", shape)
        seconds = []
        for number in range(6):
            history, turn = Turn(shape.mean_history, 1, 0.0), Turn(shape.turn_tokens, 2, 0.5)
            results = player.play([Conversation(f"probe-{number}", "", 0.0, (history, turn))], number)
            fail_on(results)
            seconds.append(results[1].extra["timings"]["prefill_ms"] / 1e3)
    return median(seconds[1:])  # the first pays for what a server sets up


def load_seconds(player: Player, shape: Shape, bytes_per_token: int) -> float:
    """Of a mean history from the throttled disk, by what the transfer threads say of the loads of a burst."""
    before = player.rest()
    fail_on(player.play(together(shape, shape.turn_tokens, "probe"), 1))
    after = player.rest()

    def moved(what: str) -> float:
        names = [f'reprise_moved_{what}_total{{direction="{d}"}}' for d in ("disk_to_hbm", "disk_to_dram")]
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

    size = shape.mean_history * bytes_per_token
    return moved("seconds") / moved("bytes") * size if moved("bytes") else float("nan")


def service_rate(player: Player, shape: Shape, bursts: int) -> float:
    """Turns a second of bursts of all conversations; the median."""
    rates = []
    for number in range(bursts):
        results = player.play(together(shape, shape.turn_tokens, "probe"), 10 + number)
        fail_on(results)
        rates.append(len(results) / max(result.done_s for result in results))
        player.rest()
    return median(rates)


# --- results ----------------------------------------------------------------------------------------------------------


def describe(legs: Sequence[Leg]) -> dict[str, Any]:
    """Of one server at one rate."""
    samples = [sample for leg in legs for sample in leg.samples]
    ttft_ms = [s.ttft_s * 1e3 for s in samples if s.ttft_s is not None]
    gaps_ms = [gap * 1e3 for s in samples for gap in s.gaps_s]
    counts: Counter[str] = Counter()
    for leg in legs:
        counts.update(leg.counts)
    loads = {name: counts[f"loads {name}"] for name in ("finished", "hidden", "exposed")}
    loads["uncounted"] = max(0, sum(s.loaded for s in samples) - sum(loads.values()))
    load_s, wait_s = sum(leg.load_s for leg in legs), sum(leg.load_wait_s for leg in legs)
    seconds = sum(leg.seconds for leg in legs)
    waits_ms = {c: [s.queue_s * 1e3 for s in samples if s.tier_class == c] for c in (1, 2, 3)}
    return {
        "turns": len(samples),
        "failed": sum(s.ttft_s is None for s in samples),
        "errors": dict(Counter(s.error for s in samples if s.error)),
        "ttft_ms": {name: rounded(percentile(ttft_ms, p)) for name, p in PERCENTILES.items()},
        "itl_ms": {name: rounded(percentile(gaps_ms, p)) for name, p in PERCENTILES.items()},
        "max_wait_ms_by_class": {str(c): rounded(max(waits, default=0.0)) for c, waits in waits_ms.items()},
        "turns_by_class": {str(c): len(waits) for c, waits in waits_ms.items()},
        "prompt_tokens": {tier: sum(s.tokens.get(tier, 0) for s in samples) for tier in TIERS},
        "computed_tokens": dict(sum((Counter(s.missed) for s in samples), Counter[str]())),
        "loads": loads,
        "loads_hidden": rounded(hidden_share(loads), 4),
        "load_time_hidden": rounded(1 - wait_s / load_s, 4) if load_s else None,
        "goodput": rounded(sum(s.is_good for s in samples) / seconds, 3),
        "strict_goodput": rounded(sum(s.is_strictly_good for s in samples) / seconds, 3),
        "throughput": rounded(len(ttft_ms) / seconds, 3),
        "offered_rate": rounded(mean_of([leg.rate for leg in legs]), 3),
        "overtakes": counts["overtakes"],
        "preemptions": counts["preemptions"],
        "fair_preemptions": counts["fair_preemptions"],
        "timer": {name.split()[1]: n for name, n in counts.items() if name.startswith("timer ")},
    }


PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None or value != value else round(value, digits)


def hidden_share(loads: dict[str, int]) -> float | None:
    total = sum(loads.values())
    return (loads["finished"] + loads["hidden"]) / total if total else None


def ratios(arms: dict[str, Any], legs: Sequence[Leg], share: float) -> dict[str, Any]:
    """TTFT of `car` in units of the others', of all turns and round by round."""
    found: dict[str, Any] = {}
    for other in (p for p in POLICIES[1:] if str(share) in arms.get(p, {}) and str(share) in arms.get("car", {})):
        mine, theirs = arms["car"][str(share)]["ttft_ms"], arms[other][str(share)]["ttft_ms"]
        rounds = sorted({leg.round_ for leg in legs})
        by_round = [
            {p: describe([leg for leg in legs if (leg.policy, leg.share, leg.round_) == (p, share, r)]) for p in
             ("car", other)}
            for r in rounds
        ]  # fmt: skip
        found[f"car/{other}"] = {
            **{name: ratio(mine[name], theirs[name]) for name in PERCENTILES},
            "p95_by_round": [ratio(b["car"]["ttft_ms"]["p95"], b[other]["ttft_ms"]["p95"]) for b in by_round],
        }
    return found


def ratio(over: float | None, under: float | None) -> float | None:
    return round(over / under, 4) if over is not None and under else None


def summarize(legs: Sequence[Leg]) -> dict[str, Any]:
    shares = sorted({leg.share for leg in legs})
    arms = {
        policy: {
            str(share): describe(some)
            for share in shares
            if (some := [leg for leg in legs if (leg.policy, leg.share) == (policy, share)])
        }
        for policy in POLICIES
    }
    return {"arms": arms, "ratios": {str(share): ratios(arms, legs, share) for share in shares}}


def verdicts(summary: dict[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds. A turn that failed holds nothing."""
    held: dict[str, bool] = {}
    mine = summary["arms"]["car"]
    if mine:
        loads: Counter[str] = Counter()
        for values in mine.values():
            loads.update(values["loads"])
        share = hidden_share(loads)
        held[f"car: at least {MIN_HIDDEN:.0%} of loads finished or hidden"] = share is not None and share >= MIN_HIDDEN
        failed = sum(values["failed"] for arm in summary["arms"].values() for values in arm.values())
        held["every turn is answered"] = failed == 0
    last = max(summary["ratios"], key=float, default=None)
    for share, found in summary["ratios"].items():
        if (p95 := found.get("car/fcfs", {}).get("p95")) is not None:
            most = NEAR_SATURATION if share == last else BELOW
            held[f"{float(share):.0%} of the service rate: TTFT p95 at most {most} x fcfs"] = p95 <= most
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    calibration = result["calibration"]
    console.print(
        f"new tokens of a turn: {calibration['prefill_s'] * 1e3:.0f} ms; its history from the disk at "
        f"{calibration['disk_gbps']:.3f} GB/s: {calibration['load_s'] * 1e3:.0f} ms; "
        f"service rate {calibration['service_rate']:.2f} turns/s"
    )
    table = Table(title="Turns by arrival rate and scheduler", title_justify="left")
    for heading in ("rate", "policy", "TTFT p50", "p95", "p99 ms", "max wait ms by class", "loads in time",
                    "ITL p99", "goodput", "strict", "failed"):  # fmt: skip
        table.add_column(heading, justify="right")
    for share in result["ratios"]:
        for policy, arm in result["arms"].items():
            if (v := arm.get(share)) is None:
                continue
            hidden = "-" if v["loads_hidden"] is None else f"{v['loads_hidden']:.1%}"
            waits = " / ".join(f"{ms:.0f}" for ms in v["max_wait_ms_by_class"].values())
            table.add_row(
                f"{float(share):.0%}", policy, *(f"{v['ttft_ms'][name] or 0:.0f}" for name in PERCENTILES), waits,
                f"{hidden} of {sum(v['loads'].values())}", f"{v['itl_ms']['p99'] or 0:.0f}", f"{v['goodput']:.2f}",
                f"{v['strict_goodput']:.2f}", str(v["failed"]),
            )  # fmt: skip
    console.print(table)
    for share, found in result["ratios"].items():
        for name, values in found.items():
            numbers = ", ".join(f"{p} {values[p]}" for p in PERCENTILES)
            console.print(f"{float(share):.0%}, {name}: {numbers}; p95 by round {values['p95_by_round']}")
    for line, holds in result["held"].items():
        console.print(f"[green]held[/green]     {line}" if holds else f"[red]NOT held[/red] {line}")


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(
    model: str, shape: Shape, policies: tuple[str, ...], rounds: int, in_hbm: int, in_dram: int, window: int,
    directory: Path, console: Console, keep: Callable[[Calibration, list[Leg]], None],
) -> tuple[Calibration, list[Leg]]:  # fmt: skip
    """`keep` is called with what there is behind every round. Raises ServerFailed, and RuntimeError where conversations
    cannot begin."""
    bytes_per_token = kv_bytes_per_token(model)
    legs: list[Leg] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ExitStack() as stack:
        bar = progress.add_task("calibrating", total=rounds * len(shape.shares) * len(policies))
        prefill_s = prefill_seconds(model, shape, directory / "probe")
        gbps = shape.mean_history * bytes_per_token / 1e9 / prefill_s
        players = {}
        for policy in dict.fromkeys((*policies, "fcfs")):
            settings = settings_of(policy, model, shape, in_hbm, in_dram, window, gbps, directory / policy)
            players[policy] = Player(stack.enter_context(serve(policy, settings)), policy, shape)
            players[policy].begin("warm-up", 0)
            players[policy].forget()
        neutral = players["fcfs"]
        neutral.begin("probe", 0)
        load_s = load_seconds(neutral, shape, bytes_per_token)
        window = players[policies[0]].state()["window"]
        calibration = Calibration(prefill_s, gbps, load_s, service_rate(neutral, shape, 2), window)
        neutral.forget()
        for round_ in range(rounds):
            for policy in policies:
                players[policy].begin(f"r{round_}", round_)
            for place in range(len(shape.shares)):
                share = shape.shares[(place + round_) % len(shape.shares)]
                shift = (round_ + place) % len(policies)
                for policy in policies[shift:] + policies[:shift]:
                    progress.update(bar, description=f"round {round_ + 1}, {share:.0%}, {policy}")
                    rate = share * calibration.service_rate
                    legs.append(players[policy].leg(share, rate, round_, f"r{round_}", 100 * (round_ + 1) + place))
                    progress.advance(bar)
            keep(calibration, legs)
            for policy in policies if round_ < rounds - 1 else ():
                players[policy].forget()
    return calibration, legs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of another model; default: the 125 M-shape random one, made anew")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--first-tokens", type=int, default=1000)
    parser.add_argument("--turn-tokens", type=int, default=150)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=2, help="of every conversation in a leg")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="rates, of the service rate")
    parser.add_argument("--in-hbm", type=int, default=5, help="conversations that HBM holds")
    parser.add_argument("--in-dram", type=int, default=3, help="conversations that DRAM holds")
    parser.add_argument("--window", type=int, default=0, help="places of car's window; 0: what the server makes of it")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--no-result", action="store_true", help="do not write the result file")
    arguments = parser.parse_args()
    console = Console()
    shape = Shape(
        arguments.conversations, arguments.first_tokens, arguments.turn_tokens, arguments.answer_tokens,
        arguments.turns, tuple(sorted(arguments.shares)),
    )  # fmt: skip
    policies = tuple(p for p in POLICIES if p in arguments.policies)

    def result(calibration: Calibration, legs: list[Leg]) -> dict[str, Any]:
        summary = summarize(legs)
        return {
            "workload": {
                "conversations": shape.conversations, "first_tokens": shape.first_tokens,
                "turn_tokens": shape.turn_tokens, "answer_tokens": shape.answer_tokens, "turns_per_leg": shape.turns,
                "mean_history": shape.mean_history, "mean_tokens": shape.mean_tokens,
                "final_tokens": shape.final_tokens, "in_hbm": arguments.in_hbm,
                "in_dram": arguments.in_dram, "max_seqs": max(1, arguments.in_hbm - 1), "rounds": arguments.rounds,
                "rounds_done": len({leg.round_ for leg in legs}),
            },
            "slo": {"ttft_s": TTFT_S, "itl_s": ITL_S},
            "calibration": {
                "prefill_s": round(calibration.prefill_s, 4), "disk_gbps": round(calibration.disk_gbps, 4),
                "load_s": round(calibration.load_s, 4), "service_rate": round(calibration.service_rate, 3),
                "window": calibration.window,
            },
            "held": verdicts(summary),
            **summary,
        }  # fmt: skip

    def keep(calibration: Calibration, legs: list[Leg]) -> None:
        if not arguments.no_result:
            write_result("schedulers", result(calibration, legs))

    with tempfile.TemporaryDirectory(prefix="reprise-schedulers-") as name:
        directory = Path(name)
        model = arguments.model or str(directory / "model")
        if not arguments.model:
            make_model(Path(model), SHAPES["125m"], seed=0)
        calibration, legs = measure(
            model, shape, policies, arguments.rounds, arguments.in_hbm, arguments.in_dram, arguments.window, directory,
            console, keep,
        )  # fmt: skip
    final = result(calibration, legs)
    show(console, final)
    return 0 if final["held"] and all(final["held"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
