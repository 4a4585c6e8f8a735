"""What the background offloader and CaR's scores gain: the same turns with and without each, on a virtual clock.

    python -m benchmarks.scheduling.ablation

The real scheduler and cache manager (`reprise.loadgen.virtual.simulation`), `experiment.hbm_high_water` at 0.9 and off,
and victims chosen by scores first or by the eviction policy alone. Two loads: turns that come one by one, and a queue.
HBM holds five conversations, DRAM six; the rest is on disk. Arms share arrivals. Shown: TTFT of an arm in units of the
arm without either, all turns of all seeds together, with a bootstrap interval over seeds. A gain is a ratio whose
interval lies below 1.
"""

import random
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.measures import interval, mean_of, rounded
from reprise.loadgen.percentile import percentile
from reprise.loadgen.virtual.simulation import Simulation, VirtualServer
from reprise.loadgen.workloads.workload import ConversationShape, poisson

ARMS = {"neither": (1.0, False), "offloader": (0.9, False), "scores": (1.0, True), "both": (0.9, True)}
LOADS = {"one by one": 0.6, "a queue": 1.4}  # conversations begun a second
SHAPE = ConversationShape(turns=5, prompt_tokens=150, answer_tokens=60, think_s=4.0, spread=0.4)
CONVERSATIONS, PLACES, BLOCKS = 40, 4, 40
RESAMPLED = 400


def play(high_water: float, scores: bool, rate: float, policy: str, seed: int) -> list[float]:
    """TTFT of every turn, in seconds."""
    machine = VirtualServer(
        hbm_blocks=(PLACES + 1) * BLOCKS + 10, dram_blocks=6 * BLOCKS, disk_blocks=10_000, policy=policy, window=8,
        max_seqs=PLACES, itl_target_s=0.1, high_water=high_water, low_water=high_water - 0.05, scores=scores,
        bytes_per_token=12_288,
        s_per_token=0.0006, fixed_s=0.006, s_per_row=0.0009, s_per_kilo_pair=0.00008, s_per_kilo_read=0.0008,
        dram_bytes_per_s=2e9, disk_bytes_per_s=4e7,
    )  # fmt: skip
    conversations = poisson(rng=random.Random(seed), count=CONVERSATIONS, rate_per_s=rate, shape=SHAPE)
    simulation = Simulation(machine=machine, conversations=conversations, rng=random.Random(seed))
    simulation.run()
    return [record.ttft_s for record in simulation.records if record.ttft_s is not None]


def compare(mine: Sequence[list[float]], theirs: Sequence[list[float]], share: float | None) -> dict[str, Any]:
    """Divide a percentile (or the mean: None) of my seeds by that of theirs; with its 95 % interval."""

    def figure(rounds: Sequence[list[float]]) -> float:
        pooled = [ttft_s for each in rounds for ttft_s in each]
        return mean_of(pooled) if share is None else percentile(pooled, share)

    def ratio(chosen: Sequence[int]) -> float:
        return figure([mine[n] for n in chosen]) / figure([theirs[n] for n in chosen])

    seeds = range(len(mine))
    low, high = interval(lambda rng: ratio(rng.choices(seeds, k=len(mine))), RESAMPLED)
    return {"ratio": rounded(ratio(seeds), 4), "interval": [rounded(low, 4), rounded(high, 4)]}


def measure(run: Run) -> dict[str, Any]:
    """A row per load."""
    seeds, policy = run.arguments.seeds, run.arguments.policy
    rows = []
    for load, rate in LOADS.items():
        ttft_s: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        for seed in run.track(range(seeds), load):
            for arm, (high_water, scores) in ARMS.items():
                ttft_s[arm].append(play(high_water, scores, rate, policy, seed))
        pooled = [ttft for each in ttft_s["neither"] for ttft in each]
        figures = {"mean": None, "p50": 0.5, "p95": 0.95}
        rows.append(
            {
                "load": load, "turns": len(pooled),
                "neither_ms": {"mean": rounded(mean_of(pooled) * 1e3), "p95": rounded(percentile(pooled, 0.95) * 1e3)},
                **{arm: {name: compare(ttft_s[arm], ttft_s["neither"], share) for name, share in figures.items()}
                   for arm in ARMS if arm != "neither"},
            }
        )  # fmt: skip
    return {"seeds": seeds, "policy": policy, "rows": rows}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="TTFT in units of an arm with neither (95 % interval)")
    for heading in ("load", "arm", "mean", "p50", "p95"):
        table.add_column(heading)
    for row in result["rows"]:
        for arm in ARMS:
            if arm in row:
                cells = (f"{v['ratio']} ({v['interval'][0]} to {v['interval'][1]})" for v in row[arm].values())
                table.add_row(row["load"], arm, *cells)
    console.print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--policy", default="car-hidden")


EXPERIMENT = Experiment(name="ablation", about=__doc__, measure=measure, show=show, options=options)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
