"""First tokens under load: conversations arrive by Poisson, on servers that differ in who starts next and in what a
step may take.

    python -m benchmarks.scheduling.poisson
    python -m benchmarks.scheduling.poisson --seeds 4 --arms car-hidden-auto fcfs-0

A random 125 M-shape model in bf16, all KV in HBM. A conversation begins with 1,000 tokens; each later turn brings 100
more, 4 s after the answer before it; answers have 32. The servers are a policy and `scheduler.itl_target_ms`:

    car-hidden-auto  the default
    car-hidden-0     no target
    car-hidden-100   100 ms, the default before `auto`
    priority-auto, priority-0, fcfs-auto, fcfs-0

All KV is in HBM, where `car` and `car-hidden` are one order.

In a round every server gets the same conversations, one after the other, in an order that moves on with every round;
the others idle meanwhile. Every round is another seed: other arrivals, other texts. A server's turns of all rounds
count together.

Held, of the default against the same server with `fcfs` and no target: TTFT p50 of returning turns at most 0.95 x, of
first ones at most 1.0 x, TPOT p50 at most 1.05 x, over at least four seeds. What the default loses is shown: every
figure that is worse than there. A machine with hardly a queue at this rate tells them hardly apart: raise `--rate`.
"""

import asyncio
import random
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import fail_on, mean_of, ratio, rounded, target_of
from benchmarks.harness.servers import ServerProcess, serve
from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.measure.sender import run as run_workload
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, Turn

ARMS = ("car-hidden-auto", "car-hidden-0", "car-hidden-100", "priority-auto", "priority-0", "fcfs-auto", "fcfs-0")
MINE, OTHER = "car-hidden-auto", "fcfs-0"
MUSTS = {("returning", "p50"): 0.95, ("first", "p50"): 1.0, ("tpot", "p50"): 1.05}
AIMS = {("returning", "p50"): 0.85, ("first", "p50"): 0.9}
SEEDS = 4  # at least, for a verdict
FIGURES = ("p50", "mean", "p95", "p99")
NAMES = {"returning": "TTFT of returning turns", "first": "TTFT of first turns", "tpot": "TPOT", "itl": "ITL"}
TIMEOUT_S = 300.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    conversations: int = 12
    rate: float = 0.5  # of them a second
    turns: int = 5
    first_tokens: int = 1000
    more_tokens: int = 100
    answer_tokens: int = 32
    think_s: float = 4.0

    def arrivals(self, seed: int) -> list[Conversation]:
        rng, start_s, found = random.Random(seed), 0.0, []
        for number in range(self.conversations):
            start_s += rng.expovariate(self.rate)
            turns = (
                Turn(self.more_tokens if turn else self.first_tokens, self.answer_tokens, self.think_s if turn else 0.0)
                for turn in range(self.turns)
            )
            found.append(Conversation(f"s{seed} c{number}", "", start_s, tuple(turns)))
        return found

    @property
    def tokens(self) -> int:
        """All conversations' tokens at their ends, with some for the template."""
        turn = self.more_tokens + self.answer_tokens + 32
        return self.conversations * (self.first_tokens + self.turns * turn)


@dataclass(frozen=True, slots=True)
class Round:
    """On one server, in seconds."""

    arm: str
    seed: int
    first_s: list[float]  # TTFT
    returning_s: list[float]
    tpot_s: list[float]
    gaps_s: list[float]
    seconds: float
    tokens: int  # of answers


def settings_of(arm: str, model: str, workload: Workload) -> dict[str, Any]:
    policy, _, target = arm.rpartition("-")
    return {
        "model.source": model,
        "model.dtype": "bfloat16",
        "cache.hbm_tokens": 2 * workload.tokens,
        "cache.dram_gib": 1,
        "scheduler.policy": policy,
        "scheduler.itl_target_ms": target,
    }


def round_of(arm: str, seed: int, results: Sequence[TurnResult]) -> Round:
    """Raises RuntimeError if one has failed."""
    fail_on(results)
    ttft_s: dict[bool, list[float]] = {True: [], False: []}
    for result in results:
        ttft_s[result.turn > 0].append(result.token_s[0] - result.due_s)
    spoken = [r for r in results if r.completion_tokens > 1]
    return Round(
        arm, seed, ttft_s[False], ttft_s[True],
        [(r.token_s[-1] - r.token_s[0]) / (r.completion_tokens - 1) for r in spoken],
        [gap_s for r in results for gap_s in r.gaps_s],
        max(r.done_s for r in results) - min(r.sent_s for r in results), sum(r.completion_tokens for r in results),
    )  # fmt: skip


def describe(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of one server, in ms."""
    found: dict[str, Any] = {}
    for name in NAMES:
        values = [1e3 * value for r in rounds for value in getattr(r, "gaps_s" if name == "itl" else f"{name}_s")]
        found[name] = {
            "count": len(values), "mean": rounded(mean_of(values)),
            **{f"p{share}": rounded(percentile(values, share / 100)) for share in (50, 95, 99)},
        }  # fmt: skip
    found["tokens_per_s"] = rounded(sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds))
    return found


def ratios(arms: dict[str, Any], rounds: Sequence[Round]) -> dict[str, Any]:
    """Every server's figures over those of `OTHER`; and of the p50s also the median of the seeds' ratios."""
    if OTHER not in arms:
        return {}
    found: dict[str, Any] = {}
    theirs = arms[OTHER]
    for arm, mine in arms.items():
        found[arm] = {n: {f: ratio(mine[n][f], theirs[n][f]) for f in FIGURES} for n in NAMES}
        found[arm]["tokens_per_s"] = ratio(mine["tokens_per_s"], theirs["tokens_per_s"])
        for name in ("returning", "first"):
            found[arm][name]["p50_by_seed"] = median(_by_seed(arm, name, rounds))
    return found


def _by_seed(arm: str, name: str, rounds: Sequence[Round]) -> list[float]:
    p50 = {(r.arm, r.seed): median(getattr(r, f"{name}_s")) for r in rounds}
    return [round(value / p50[OTHER, seed], 4) for (a, seed), value in p50.items() if a == arm and (OTHER, seed) in p50]


def verdicts(found: dict[str, Any], seeds: int) -> dict[str, bool]:
    """What is held -> whether it holds."""
    if MINE not in found:
        return {}
    held = {f"at least {SEEDS} seeds": seeds >= SEEDS}
    for (name, figure), most in MUSTS.items():
        value = found[MINE][name][figure]
        held[f"{NAMES[name]}, {figure}: at most {most} x {OTHER} ({value})"] = value is not None and value <= most
    return held


def losses(found: dict[str, Any]) -> list[str]:
    """What the default does worse than `OTHER`, worst first."""
    if MINE not in found:
        return []
    rows = [
        (value, f"{NAMES[name]}, {figure}: {value} x")
        for name in NAMES
        for figure, value in found[MINE][name].items()
        if value is not None and value > 1
    ]
    rate = found[MINE]["tokens_per_s"]
    if rate is not None and rate < 1:
        rows.append((1 / rate, f"tokens a second: {rate} x"))
    return [row for _, row in sorted(rows, reverse=True)]


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    arms = {arm: describe([r for r in rounds if r.arm == arm]) for arm in dict.fromkeys(r.arm for r in rounds)}
    found = ratios(arms, rounds)
    summary = {
        "held": verdicts(found, len({r.seed for r in rounds})),
        "lost": losses(found),
        "arms": arms,
        f"over_{OTHER}": found,
    }
    if MINE in found:
        summary["aims"] = {f"{NAMES[n]}, {f}": [found[MINE][n][f], most] for (n, f), most in AIMS.items()}
    return summary


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"Times in ms; in brackets p50 over that of {OTHER}", title_justify="left")
    for heading in ("server", "returning p50", "mean", "p95", "first p50", "mean", "p95", "TPOT p50", "ITL p50", "p99",
                    "tokens/s"):  # fmt: skip
        table.add_column(heading, justify="right")
    over = result[f"over_{OTHER}"]
    for arm, v in result["arms"].items():

        def p50(name: str, arm: str = arm, v: dict[str, Any] = v) -> str:
            times = f" ({over[arm][name]['p50']:.2f})" if arm in over and over[arm][name]["p50"] else ""
            return f"{v[name]['p50']:.0f}{times}"

        table.add_row(
            arm, p50("returning"), *(f"{v['returning'][f]:.0f}" for f in ("mean", "p95")), p50("first"),
            *(f"{v['first'][f]:.0f}" for f in ("mean", "p95")), p50("tpot"), f"{v['itl']['p50']:.0f}",
            f"{v['itl']['p99']:.0f}", f"{v['tokens_per_s']:.1f}",
        )  # fmt: skip
    console.print(table)
    for name, (value, most) in result.get("aims", {}).items():
        console.print(f"aim      {name}: {most} x, reached {value}")
    for line in result["lost"]:
        console.print(f"[yellow]lost[/yellow]     {line}")


def measure(run: Run) -> dict[str, Any]:
    """Raises ServerFailed and RuntimeError."""
    arguments, model = run.arguments, str(run.random_model())
    workload = Workload(**{name: getattr(arguments, name) for name in asdict(Workload())})
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    played: list[Round] = []

    def play(arm: str, server: ServerProcess, seed: int, conversations: Sequence[Conversation]) -> Round:
        results = asyncio.run(run_workload(target_of(server), conversations, seed=seed, timeout_s=TIMEOUT_S))
        return round_of(arm, seed, results)

    def result() -> dict[str, Any]:
        return {"workload": asdict(workload), "seeds": sorted({r.seed for r in played}), **summarize(played)}

    with ExitStack() as stack:
        servers = {arm: stack.enter_context(serve(arm, settings_of(arm, model, workload))) for arm in arguments.arms}
        for arm, server in servers.items():  # what a server sets up, and learns, at its first requests
            warm_up = Workload(3, 2.0, 2, workload.first_tokens, workload.more_tokens, workload.answer_tokens, 0.5)
            play(arm, server, -1, warm_up.arrivals(-1))
        for seed, order in run.rounds(arguments.arms, seeds, "seed"):
            played += [play(arm, servers[arm], seed, workload.arrivals(seed)) for arm in order]
            run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    usual = Workload()
    parser.add_argument("--seeds", type=int, default=SEEDS, help="rounds, each with other arrivals")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=usual.conversations, help="in a round")
    parser.add_argument("--rate", type=float, default=usual.rate, help="conversations a second")
    parser.add_argument("--turns", type=int, default=usual.turns)
    parser.add_argument("--first-tokens", type=int, default=usual.first_tokens, help="of a conversation's first turn")
    parser.add_argument("--more-tokens", type=int, default=usual.more_tokens, help="of each later one")
    parser.add_argument("--answer-tokens", type=int, default=usual.answer_tokens)
    parser.add_argument("--think-s", type=float, default=usual.think_s)


def over_fcfs(name: str) -> Callable[[Result], float | None]:
    return lambda result: result[f"over_{OTHER}"][MINE][name]["p50"]


EXPERIMENT = Experiment(
    name="poisson", about=__doc__, measure=measure, show=show, options=options, arms=ARMS, takes_model=True,
    quick=Quick(
        options={"seeds": 1, "conversations": 6, "rate": 1.5, "think_s": 1.0, "arms": [MINE, OTHER]},
        figures=[
            Figure("returning TTFT p50, x fcfs", over_fcfs("returning"), 1.3),
            Figure("TPOT p50, x fcfs", over_fcfs("tpot"), 1.2),
        ],
        holds=False,  # one seed decides nothing
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
