"""Whether loads that the prefetch timer starts end as their turn comes, on a server with a queue and a throttled disk.

    python -m benchmarks.scheduling.prefetch_timer

Sixteen conversations of a random 125 M-shape model in bf16 return again and again to four places, so that a queue
stands. HBM holds five of them, DRAM two, and the rest lies on a disk of 0.1 GB/s. Two workloads: answers that are all
as long, and answers that differ (log-normally, by 0.4; `max_tokens` bounds each). What the scheduler counted (`GET
/v1/scheduler`): a load is on time if it ends within 50 ms, or a quarter of what it took, of the moment when its turn
comes; `at_once` came late though it was started as soon as it was known, and is not judged.

    python -m benchmarks.scheduling.prefetch_timer --arms neither offloader scores

plays all of it on three servers in turn, without and with the background offloader (`experiment.hbm_high_water` at 0.9)
and CaR's scores, and shows TTFT beside: what each gains.

Expected: at least 70 % on time where all answers are as long.
"""

import random
from argparse import ArgumentParser
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.measures import fail_on, mean_of, rounded
from benchmarks.harness.servers import serve
from benchmarks.scheduling.legs import GIB, Player
from benchmarks.scheduling.legs import Shape as Begun
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, Turn

WORKLOADS = ("equal", "spread")
JUDGED = "equal"  # how long answers will be can be known
PLACES, IN_HBM, IN_DRAM, MEAN_TOKENS = 4, 5, 2, 1200
DISK_GBPS = 0.1
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS, SPREAD = 800, 100, 32, 0.4
LEAST_ON_TIME = 0.7
ARMS: dict[str, dict[str, Any]] = {
    "neither": {},
    "offloader": {"experiment.hbm_high_water": 0.9, "experiment.hbm_low_water": 0.85},
    "scores": {"experiment.scores": "true"},
}


@dataclass(frozen=True, slots=True)
class Leg:
    arm: str
    workload: str
    round_: int
    timer: dict[str, int]
    ttft_s: list[float]


def conversations(workload: str, count: int, turns: int, seed: int) -> list[Conversation]:
    """A long first prompt, and then short ones, each sent as soon as the answer before it has ended."""
    rng = random.Random(f"{workload} {seed}")

    def answer() -> int:
        return ANSWER_TOKENS if workload == "equal" else max(1, round(ANSWER_TOKENS * rng.lognormvariate(0, SPREAD)))

    return [
        Conversation(
            f"{workload}-{seed}-{number}", "", 0.0,
            (Turn(FIRST_TOKENS, 1, 0.0), *(Turn(TURN_TOKENS, answer(), 0.0) for _ in range(turns))),
        )
        for number in range(count)
    ]  # fmt: skip


def settings_of(model: str, arm: str, directory: Path) -> dict[str, Any]:
    return {
        "model.source": model,
        "model.dtype": "bfloat16",
        "model.max_context": 2 * MEAN_TOKENS,
        "cache.hbm_tokens": IN_HBM * MEAN_TOKENS,
        "cache.dram_gib": IN_DRAM * MEAN_TOKENS * kv_bytes_per_token(model) / GIB,
        "experiment.disk_gbps": DISK_GBPS,
        "cache.disk_dir": directory,
        "scheduler.max_seqs": PLACES,
        **ARMS[arm],
    }


def play(run: Run) -> list[Leg]:
    """All workloads on all servers, which take turns. Raises RuntimeError if a turn fails."""
    legs, arguments, model = [], run.arguments, str(run.random_model())
    shape = Begun(arguments.conversations, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS, arguments.turns)
    with ExitStack() as stack:
        players = {}
        for arm in arguments.arms:
            server = stack.enter_context(serve(arm, settings_of(model, arm, run.directory / arm)))
            players[arm] = Player(server, arm, shape)
            players[arm].warm_up()
        for round_, order in run.rounds([(w, arm) for w in WORKLOADS for arm in arguments.arms], arguments.rounds):
            for workload, arm in order:
                player = players[arm]
                player.rest()
                before = player.counts()
                results = player.play(conversations(workload, arguments.conversations, arguments.turns, round_), round_)
                fail_on(results)
                player.rest()
                counts = player.counts()
                counts.subtract(before)
                timer = {name.split()[1]: n for name, n in counts.items() if name.startswith("timer ")}
                returning = sorted(results, key=lambda result: result.sent_s)[arguments.conversations :]
                ttft_s = [result.ttft_s for result in returning if result.ttft_s is not None]
                legs.append(Leg(arm, workload, round_, timer, ttft_s))
                player.forget()
    return legs


def describe(legs: list[Leg]) -> dict[str, Any]:
    """Figures of one workload on one server."""
    timer: Counter[str] = Counter()
    for leg in legs:
        timer.update(leg.timer)
    judged = sum(timer[name] for name in ("on_time", "early", "late"))
    ttft_ms = [seconds * 1e3 for leg in legs for seconds in leg.ttft_s]
    return {
        "timer": dict(timer),
        "shares": {name: rounded(timer[name] / judged, 3) if judged else None for name in ("on_time", "early", "late")},
        "ttft_ms": {"mean": rounded(mean_of(ttft_ms)), "p50": rounded(percentile(ttft_ms, 0.5)),
                    "p95": rounded(percentile(ttft_ms, 0.95))},
    }  # fmt: skip


def verdicts(arms: dict[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    shares = {arm: by_workload[JUDGED]["shares"]["on_time"] for arm, by_workload in arms.items()}
    return {
        f"{arm}, {JUDGED}: at least {LEAST_ON_TIME:.0%} on time": share is not None and share >= LEAST_ON_TIME
        for arm, share in shares.items()
    }


def measure(run: Run) -> dict[str, Any]:
    legs = play(run)
    arms: dict[str, Any] = {
        arm: {w: describe([leg for leg in legs if (leg.arm, leg.workload) == (arm, w)]) for w in WORKLOADS}
        for arm in run.arguments.arms
    }
    return {"arms": arms, "held": verdicts(arms), "legs": [asdict(leg) for leg in legs]}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Loads that the timer started")
    for heading in ("arm", "answers", "on time", "early", "late", "counts", "TTFT mean", "p50", "p95 ms"):
        table.add_column(heading)
    for arm, by_workload in result["arms"].items():
        for workload, found in by_workload.items():
            shares = [f"{value or 0:.0%}" for value in found["shares"].values()]
            times = [str(value) for value in found["ttft_ms"].values()]
            table.add_row(arm, workload, *shares, str(found["timer"]), *times)
    console.print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5, help="of each, after the first")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["neither"])


EXPERIMENT = Experiment(
    name=lambda arguments: "prefetch_timer" if len(arguments.arms) == 1 else "prefetch_timer_ablation",
    about=__doc__, measure=measure, show=show, options=options, rounds=3, takes_model=True,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
