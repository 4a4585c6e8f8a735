"""Whether loads that the prefetch timer starts end as their turn comes, on a server with a queue and a throttled disk.

    python -m benchmarks.scheduling.prefetch_timer

Sixteen conversations of a random 125 M-shape model in bf16 return again and again to four places, so that a queue
stands. HBM holds five of them, DRAM two, and the rest lies on a disk of 0.1 GB/s. Two workloads: answers that are all
as long, and answers that differ (log-normally, by 0.4; `max_tokens` bounds each). What the scheduler counted (`GET
/v1/scheduler`): a load is on time if it ends within 50 ms, or a quarter of what it took, of the moment when its turn
comes; `at_once` came late though it was started as soon as it was known, and is not judged.

    python -m benchmarks.scheduling.prefetch_timer --arms neither offloader scores

plays all of it on three servers in turn, without and with the background offloader (`cache.hbm_high_water` at 0.9) and
CaR's scores, and shows TTFT beside: what each gains.

Expected: at least 70 % on time where all answers are as long.
"""

import argparse
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.measures import fail_on, mean_of, rounded, show_held
from benchmarks.harness.servers import serve, write_result
from benchmarks.scheduling.legs import GIB, Player
from benchmarks.scheduling.legs import Shape as Begun
from loadgen.percentile import percentile
from loadgen.workloads.workload import Conversation, Turn

WORKLOADS = ("equal", "spread")
JUDGED = "equal"  # how long answers will be can be known
PLACES, IN_HBM, IN_DRAM, MEAN_TOKENS = 4, 5, 2, 1200
DISK_GBPS = 0.1
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS, SPREAD = 800, 100, 32, 0.4
LEAST_ON_TIME = 0.7
ARMS: dict[str, dict[str, Any]] = {
    "neither": {},
    "offloader": {"cache.hbm_high_water": 0.9, "cache.hbm_low_water": 0.85},
    "scores": {"scheduler.scores": "true"},
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
        "cache.disk_gbps": DISK_GBPS,
        "cache.disk_dir": directory,
        "scheduler.max_seqs": PLACES,
        **ARMS[arm],
    }


def measure(model: str, arguments: argparse.Namespace, directory: Path, console: Console) -> list[Leg]:
    """All workloads on all servers, which take turns. Raises RuntimeError if a turn fails."""
    legs = []
    shape = Begun(arguments.conversations, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS, arguments.turns)
    with ExitStack() as stack:
        players = {}
        for arm in arguments.arms:
            server = stack.enter_context(serve(arm, settings_of(model, arm, directory / arm)))
            players[arm] = Player(server, arm, shape)
            players[arm].warm_up()
        for round_ in range(arguments.rounds):
            for workload in WORKLOADS:
                for arm, player in players.items():
                    console.print(f"round {round_ + 1}, {workload}, {arm}")
                    player.rest()
                    before = player.counts()
                    results = player.play(
                        conversations(workload, arguments.conversations, arguments.turns, round_), round_
                    )
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
    """Of one workload on one server."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of another model; default: the 125 M-shape random one, made anew")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5, help="of each, behind the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["neither"])
    parser.add_argument("--no-result", action="store_true", help="do not write the result file")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="reprise-timer-") as name:
        model = arguments.model or str(Path(name) / "model")
        if not arguments.model:
            make_model(Path(model), SHAPES["125m"], seed=0)
        legs = measure(model, arguments, Path(name), console)
    arms: dict[str, Any] = {
        arm: {w: describe([leg for leg in legs if (leg.arm, leg.workload) == (arm, w)]) for w in WORKLOADS}
        for arm in arguments.arms
    }  # fmt: skip
    table = Table(title="Loads that the timer started")
    for heading in ("arm", "answers", "on time", "early", "late", "counts", "TTFT mean", "p50", "p95 ms"):
        table.add_column(heading)
    held = {}
    for arm, by_workload in arms.items():
        for workload, found in by_workload.items():
            shares = [f"{value or 0:.0%}" for value in found["shares"].values()]
            times = [str(value) for value in found["ttft_ms"].values()]
            table.add_row(arm, workload, *shares, str(found["timer"]), *times)
            if workload == JUDGED:
                on_time = found["shares"]["on_time"]
                held[f"{arm}, {workload}: at least {LEAST_ON_TIME:.0%} on time"] = (
                    on_time is not None and on_time >= LEAST_ON_TIME
                )
    console.print(table)
    show_held(console, held)
    if not arguments.no_result:
        name = "prefetch_timer" if len(arms) == 1 else "prefetch_timer_ablation"
        write_result(name, {"arms": arms, "held": held, "legs": [asdict(leg) for leg in legs]})
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
