"""First tokens under load, on servers that differ in the order of the queue and in what a step may take.

    python -m benchmarks.scheduling.served
    python -m benchmarks.scheduling.served --seeds 4 --arms due-auto fcfs-0

A random 125 M-shape model in bf16. An arm is a policy and `scheduler.itl_target_ms`; `due-auto` is the default.
In a round every server gets the same conversations, one after the other, in an order that moves on with every round;
the others idle meanwhile. Every round is another seed: other arrivals, other texts. A server's turns of all rounds
count together. Conversations begin with 1,000 tokens; each later turn brings 100 more, 4 s after the answer before it;
answers have 32. All KV is in HBM.

Held, of the default against the same server with `fcfs` and no target: TTFT p50 of returning turns at most 0.95 x, of
first ones at most 1.0 x, TPOT p50 at most 1.05 x, over at least four seeds. All figures over those of that server are
shown. A machine with hardly a queue at this rate tells them hardly apart: raise `--rate`.
"""

import asyncio
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import HEARTBEAT_S, fail_on, mean_of, ratio, rounded, target_of
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.tables import show_rows
from benchmarks.scheduling.workloads import DEFAULT, Poisson
from reprise.loadgen.measure.sender import TurnResult, run
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation
from reprise.scheduler.make_policy import POLICIES

ARMS = (*(f"{order}-{target}" for order in POLICIES for target in ("auto", "0")), f"{DEFAULT}-100")
MINE, OTHER = f"{DEFAULT}-auto", "fcfs-0"
MUSTS = {("returning", "p50"): 0.95, ("first", "p50"): 1.0, ("tpot", "p50"): 1.05}
SEEDS = 4  # at least, for a verdict
FIGURES = ("p50", "mean", "p95", "p99")
NAMES = {"returning": "TTFT of returning turns", "first": "TTFT of first turns", "tpot": "TPOT", "itl": "ITL"}
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """The times of one round on one server, in seconds."""

    arm: str
    seed: int
    first_s: list[float]  # TTFT
    returning_s: list[float]
    tpot_s: list[float]
    gaps_s: list[float]
    seconds: float
    tokens: int  # tokens of answers


def settings_of(arm: str, model: str, workload: Poisson) -> dict[str, Any]:
    policy, _, target = arm.rpartition("-")
    return {
        "model.source": model, "model.dtype": "bfloat16", "scheduler.policy": policy,
        "scheduler.itl_target_ms": target, "cache.hbm_tokens": 2 * workload.tokens, "cache.dram_gib": 1,
    }  # fmt: skip


def play(server: ServerProcess, conversations: Sequence[Conversation], seed: int) -> list[TurnResult]:
    """Raises RuntimeError if a turn has failed."""
    results = asyncio.run(run(target_of(server), conversations, seed=seed, timeout_s=TIMEOUT_S))
    fail_on(results)
    return results


def round_of(arm: str, seed: int, results: Sequence[TurnResult]) -> Round:
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


def counts(server: ServerProcess) -> Counter[str]:
    """Return what the scheduler has counted: loads by how they ended."""
    time.sleep(HEARTBEAT_S)
    state = httpx.get(f"{server.url}/v1/scheduler", timeout=10).raise_for_status().json()
    return Counter({f"loads {name}": n for name, n in state["loads"].items()})


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


def ratios(arms: dict[str, Any]) -> dict[str, Any]:
    """Every server's figures over those of `OTHER`."""
    if OTHER not in arms:
        return {}
    theirs = arms[OTHER]
    return {
        arm: {name: {f: ratio(mine[name][f], theirs[name][f]) for f in FIGURES} for name in NAMES}
        | {"tokens_per_s": ratio(mine["tokens_per_s"], theirs["tokens_per_s"])}
        for arm, mine in arms.items()
    }


def verdicts(found: dict[str, Any], seeds: int) -> dict[str, bool]:
    """Return each line that is held to, and whether it holds."""
    if MINE not in found:
        return {}
    held = {f"at least {SEEDS} seeds": seeds >= SEEDS}
    for (name, figure), most in MUSTS.items():
        value = found[MINE][name][figure]
        held[f"{NAMES[name]}, {figure}: at most {most} x {OTHER} ({value})"] = value is not None and value <= most
    return held


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    arms = {arm: describe([r for r in rounds if r.arm == arm]) for arm in dict.fromkeys(r.arm for r in rounds)}
    found = ratios(arms)
    held = verdicts(found, len({r.seed for r in rounds}))
    return {"held": held, "arms": arms, f"over_{OTHER}": found}


def show(console: Console, result: dict[str, Any]) -> None:
    for title, arms in (("Times in ms", result["arms"]), (f"Over {OTHER}", result[f"over_{OTHER}"])):
        rows = {arm: {f"{name} {f}": v[name][f] for name in NAMES for f in FIGURES} for arm, v in arms.items()}
        show_rows(console, title, {arm: row | {"tokens/s": arms[arm]["tokens_per_s"]} for arm, row in rows.items()})


def measure(run: Run) -> dict[str, Any]:
    """Raises ServerFailed and RuntimeError."""
    arguments, model = run.arguments, str(run.random_model())
    asked = ("conversations", "rate", "turns", "think_s")
    workload = Poisson(**{name: getattr(arguments, name) for name in asked})
    counted: dict[str, Counter[str]] = {arm: Counter() for arm in arguments.arms}
    played: list[Round] = []

    def result() -> dict[str, Any]:
        seeds = sorted({r.seed for r in played})
        return {"workload": asdict(workload), "seeds": seeds, **summarize(played), "counts": counted}

    with ExitStack() as stack:
        servers = {arm: stack.enter_context(serve(arm, settings_of(arm, model, workload))) for arm in arguments.arms}
        for server in servers.values():  # what a server sets up, and learns, at its first requests
            play(server, Poisson(conversations=3, rate=2.0, turns=2, think_s=0.5).arrivals(-1), -1)
        for seed, order in run.rounds(arguments.arms, range(1, arguments.seeds + 1), "seed"):
            for arm in order:
                before = counts(servers[arm])
                played.append(round_of(arm, seed, play(servers[arm], workload.arrivals(seed), seed)))
                counted[arm] += counts(servers[arm]) - before
            run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    usual = Poisson()
    parser.add_argument("--seeds", type=int, default=SEEDS, help="rounds, each with other arrivals")
    parser.add_argument("--rate", type=float, default=usual.rate, help="conversations a second")
    parser.add_argument("--turns", type=int, default=usual.turns, help="of a conversation")
    parser.add_argument("--conversations", type=int, default=usual.conversations, help="in a round")
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
