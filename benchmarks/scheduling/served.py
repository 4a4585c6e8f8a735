"""First tokens on servers that differ in the order of the queue, at a rate that they just carry.

    python -m benchmarks.scheduling.served
    python -m benchmarks.scheduling.served --kv disk --shares 1.0 --arms due fcfs --seeds 6
    python -m benchmarks.scheduling.served --arms due fcfs --other ../before/.venv/bin/reprise car-hidden

A random 125 M-shape model in bf16. Conversations begin by a Poisson process, by default with 1,000 tokens; each later
turn brings 100 more; answers have 32. These are means: lengths are log-normal (sigma 1). KV is kept in HBM, or on disk
by servers whose HBM holds a fourth of it. Rates are shares of the turns a second that `fcfs` works off when all
conversations come at once. The pause before a later turn is a 25th of the time in which a round's conversations begin,
so that the load does not depend on the machine's speed.

An arm is an order of the queue; `--other` adds an order that only another checkout's program has. In a round every
server gets the same conversations, one server after the other, in an order that moves on with every round; the others
idle meanwhile. Every round is another seed: other arrivals, lengths and texts. A server's turns of all rounds count
together.

Held in each setting, over at least four seeds, of the default against each other order: TTFT mean, p50 and p95 at most
1 x, E2E mean and p95 at most 1 x, TPOT p50 at most 1.02 x, tokens a second at least 0.99 x. (E2E is from a turn's
arrival to its last token. A turn that starts sooner may decode beside a long prompt that it would have waited for:
its TPOT is longer then, and its E2E is not.)
"""

import asyncio
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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

MUSTS = {
    ("ttft", "mean"): 1.0,
    ("ttft", "p50"): 1.0,
    ("ttft", "p95"): 1.0,
    ("e2e", "mean"): 1.0,
    ("e2e", "p95"): 1.0,
    ("tpot", "p50"): 1.02,
}
TOKENS_MUST = 0.99
SEEDS = 4  # at least, for a verdict
FIGURES = ("p50", "mean", "p95", "p99", "max")
NAMES = {
    "ttft": "TTFT",
    "first": "TTFT of first turns",
    "returning": "TTFT of returning turns",
    "e2e": "E2E",
    "tpot": "TPOT",
    "itl": "ITL",
}
SHOWN = {
    "ttft": ("mean", "p50", "p95", "max"),
    "first": ("mean", "p95"),
    "returning": ("mean", "p95"),
    "e2e": ("mean", "p50", "p95"),
    "tpot": ("p50",),
    "itl": ("p99",),
}
HBM_SHARE = 4  # KV on disk: HBM holds one part of so many
PAUSE = 0.04  # before a later turn, in times of the span in which a round's conversations begin
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """The times of one round on one server, in seconds."""

    arm: str
    seed: int
    first_s: list[float]  # TTFT
    returning_s: list[float]
    e2e_s: list[float]
    tpot_s: list[float]
    itl_s: list[float]
    seconds: float
    tokens: int  # tokens of answers

    @property
    def ttft_s(self) -> list[float]:
        return [*self.first_s, *self.returning_s]


def settings_of(policy: str, kv: str, model: str, workload: Poisson) -> dict[str, Any]:
    usual = {"model.source": model, "model.dtype": "bfloat16", "scheduler.policy": policy}
    if kv == "hbm":
        return {**usual, "cache.hbm_tokens": 2 * workload.tokens, "cache.dram_gib": 1}
    return {**usual, "cache.hbm_tokens": workload.tokens // HBM_SHARE, "cache.dram_gib": 0, "cache.disk_gib": 8}


def play(server: ServerProcess, conversations: Sequence[Conversation], seed: int) -> list[TurnResult]:
    """Send the conversations to a server and return the results. Raises RuntimeError if a turn fails."""
    results = asyncio.run(run(target_of(server), conversations, seed=seed, timeout_s=TIMEOUT_S))
    fail_on(results)
    return results


def round_of(arm: str, seed: int, results: Sequence[TurnResult]) -> Round:
    ttft_s: dict[bool, list[float]] = {True: [], False: []}
    for result in results:
        ttft_s[result.turn > 0].append(result.token_s[0] - result.due_s)
    spoken = [r for r in results if r.completion_tokens > 1]
    return Round(
        arm, seed, ttft_s[False], ttft_s[True], [r.token_s[-1] - r.due_s for r in results],
        [(r.token_s[-1] - r.token_s[0]) / (r.completion_tokens - 1) for r in spoken],
        [gap_s for r in results for gap_s in r.gaps_s],
        max(r.done_s for r in results) - min(r.sent_s for r in results), sum(r.completion_tokens for r in results),
    )  # fmt: skip


def counts(server: ServerProcess) -> Counter[str]:
    """Return how many loads the scheduler has counted so far, by the way they ended."""
    time.sleep(HEARTBEAT_S)
    state = httpx.get(f"{server.url}/v1/scheduler", timeout=10).raise_for_status().json()
    return Counter({f"loads {name}": n for name, n in state["loads"].items()})


def describe(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of one server, times in ms."""
    found: dict[str, Any] = {}
    for name in NAMES:
        values = [1e3 * value for r in rounds for value in getattr(r, f"{name}_s")]
        found[name] = {
            "count": len(values), "mean": rounded(mean_of(values)), "max": rounded(max(values, default=0.0)),
            **{f"p{share}": rounded(percentile(values, share / 100)) for share in (50, 95, 99)},
        }  # fmt: skip
    found["tokens_per_s"] = rounded(sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds))
    return found


def ratios(arms: dict[str, Any], other: str) -> dict[str, Any]:
    """Return the figures of every server but `other`, divided by those of `other`."""
    theirs = arms[other]
    return {
        arm: {name: {f: ratio(mine[name][f], theirs[name][f]) for f in FIGURES} for name in NAMES}
        | {"tokens_per_s": ratio(mine["tokens_per_s"], theirs["tokens_per_s"])}
        for arm, mine in arms.items()
        if arm != other
    }


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of one setting: those of each server, and their ratios to those of each other server."""
    arms = {arm: describe([r for r in rounds if r.arm == arm]) for arm in dict.fromkeys(r.arm for r in rounds)}
    return {"arms": arms, "over": {other: ratios(arms, other) for other in arms}}


def verdicts(rows: Sequence[dict[str, Any]], seeds: int) -> dict[str, bool]:
    """Return claim -> whether it holds. seeds: number of rounds."""
    held = {f"at least {SEEDS} seeds": seeds >= SEEDS}
    for row in rows:
        where = f"KV in {row['kv']}, {row['share']:.0%}"
        for other, found in row["over"].items():
            if other == DEFAULT or DEFAULT not in found:
                continue
            mine = found[DEFAULT]
            for (name, figure), most in MUSTS.items():
                value = mine[name][figure]
                line = f"{where}: {NAMES[name]} {figure} at most {most} x {other} ({value})"
                held[line] = value is not None and value <= most
            line = f"{where}: tokens a second at least {TOKENS_MUST} x {other} ({mine['tokens_per_s']})"
            held[line] = mine["tokens_per_s"] >= TOKENS_MUST
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    for row in result["rows"]:
        where = f"KV in {row['kv']}, {row['share']:.0%} of {row['carried']} turns/s"
        for title, arms in (("ms", row["arms"]), *((f"over {other}", found) for other, found in row["over"].items())):
            values = {
                arm: {name: " / ".join(f"{v[name][f]:.4g}" for f in figures) for name, figures in SHOWN.items()}
                for arm, v in arms.items()
            }
            show_rows(console, f"{where}: {title}",
                      {arm: v | {"tokens/s": arms[arm]["tokens_per_s"]} for arm, v in values.items()})  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """Play all settings on all servers and return the result. Raises ServerFailed, and RuntimeError if a turn fails."""
    arguments, model = run.arguments, str(run.random_model())
    asked = ("conversations", "turns", "first_tokens")
    workload = Poisson(think_s=0.0, **{name: getattr(arguments, name) for name in asked})
    seeds = range(1, arguments.seeds + 1)
    programs = {arguments.other[1]: Path(arguments.other[0]).absolute()} if arguments.other else {}
    arms = [*arguments.arms, *programs]
    rows: list[dict[str, Any]] = []

    def result() -> dict[str, Any]:
        held = verdicts(rows, len(seeds))
        return {
            "held": held,
            "workload": asdict(workload) | {"lengths": "lognormal", "pause": PAUSE},
            "seeds": len(seeds),
            "rows": rows,
        }

    for kv in arguments.kv:
        with ExitStack() as stack:
            servers = {
                arm: stack.enter_context(
                    serve(f"{arm} {kv}", settings_of(arm, kv, model, workload), program=programs.get(arm))
                )
                for arm in arms
            }
            for server in servers.values():  # what a server sets up, and learns, at its first requests
                play(server, replace(workload, conversations=3, think_s=0.5).arrivals(-1), -1)
            for share in arguments.shares:  # what is carried is measured each time: a shared machine's speed changes
                carried = arguments.carried or carries(servers["fcfs" if "fcfs" in servers else DEFAULT], workload)
                played: list[Round] = []
                counted: dict[str, Counter[str]] = {arm: Counter() for arm in servers}
                rate = share * carried / workload.turns
                loaded = replace(workload, rate=rate, think_s=PAUSE * workload.conversations / rate)
                for seed, order in run.rounds(arms, seeds, f"KV in {kv}, {share:.0%}, seed"):
                    for arm in order:
                        before = counts(servers[arm])
                        played.append(round_of(arm, seed, play(servers[arm], loaded.arrivals(seed), seed)))
                        counted[arm] += counts(servers[arm]) - before
                row = {"kv": kv, "share": share, "carried": rounded(carried, 3), "rate": rounded(rate, 4),
                       "think_s": rounded(loaded.think_s)}  # fmt: skip
                rows.append({**row, **summarize(played), "counts": counted})
                run.keep(result())
    return result()


def carries(server: ServerProcess, workload: Poisson) -> float:
    """Return how many turns a second a server completes if all conversations begin at once and have no think time."""
    results = play(server, replace(workload, rate=1e6, think_s=0.0).arrivals(0), 0)
    return len(results) / (max(r.done_s for r in results) - min(r.sent_s for r in results))


def options(parser: ArgumentParser) -> None:
    usual = Poisson()
    parser.add_argument("--seeds", type=int, default=SEEDS, help="rounds, each with other arrivals")
    parser.add_argument("--kv", nargs="+", choices=["hbm", "disk"], default=["hbm", "disk"], help="its place")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 1.0], help="of the rate that is carried")
    parser.add_argument("--carried", type=float, help="turns a second; default: measured")
    parser.add_argument("--turns", type=int, default=usual.turns, help="of a conversation")
    parser.add_argument("--conversations", type=int, default=usual.conversations, help="in a round")
    parser.add_argument("--first-tokens", type=int, default=usual.first_tokens, help="mean length of first messages")
    parser.add_argument(
        "--other",
        nargs=2,
        metavar=("REPRISE", "ORDER"),
        help="the `reprise` of another checkout, and an order of its own",
    )


def over_fcfs(name: str) -> Callable[[Result], float | None]:
    return lambda result: result["rows"][0]["over"]["fcfs"][DEFAULT][name]["p50"]


EXPERIMENT = Experiment(
    name="scheduling_served", about=__doc__, measure=measure, show=show, options=options, arms=POLICIES,
    takes_model=True,
    quick=Quick(
        options={"seeds": 1, "conversations": 6, "kv": ["hbm"], "shares": [1.0],
                 "arms": [DEFAULT, "fcfs"]},
        figures=[
            Figure("TTFT p50, x fcfs", over_fcfs("ttft"), 1.3),
            Figure("TPOT p50, x fcfs", over_fcfs("tpot"), 1.2),
        ],
        holds=False,  # one seed decides nothing
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
