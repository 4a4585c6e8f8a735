"""`benchmarks.scheduling.poisson` without a model: the same arrivals, the same scheduler, steps that only take time.

    python -m benchmarks.scheduling.poisson_simulated --seeds 20 --machine slow fast tiny gpu

What a step costs was measured, in processor time, of an engine with the 125 M shape on an Intel Xeon: with AMX
(`fast`), and without (`slow`, with 930 tokens of a prompt a second). `tiny` is the bundled model there, `gpu` has the
proportions of a large model on one. All but `slow` get more conversations, or nobody would wait. It tells in what order
things are, not what a machine does; nothing is written.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.harness.experiment import show_held
from benchmarks.scheduling import poisson
from benchmarks.scheduling.poisson import Round, Workload
from reprise.loadgen.virtual.simulation import Simulation, VirtualServer

ARMS = (
    "car-hidden-auto",
    "car-hidden-0",
    "car-hidden-100",
    "car-hidden-300",
    "priority-auto",
    "priority-0",
    "fcfs-auto",
    "fcfs-0",
)


@dataclass(frozen=True, slots=True)
class Case:
    workload: Workload
    least_chunk_tokens: int  # as `reprise.engine.model.warm_up.efficient_tokens` finds it from these costs
    costs: dict[str, float]
    sizes: dict[str, int] = field(default_factory=dict)


CASES = {
    "slow": Case(Workload(), 64, {
        "fixed_s": 0.016, "chunk_fixed_s": 0.018, "s_per_token": 0.00095, "s_per_row": 0.0012,
        "s_per_kilo_pair": 0.0001, "s_per_kilo_read": 0.0006,
    }),
    "fast": Case(Workload(conversations=30, rate=4.0, think_s=0.5), 256, {
        "fixed_s": 0.0145, "chunk_fixed_s": 0.015, "s_per_token": 0.000087, "s_per_row": 0.0006,
        "s_per_kilo_pair": 0.000042, "s_per_kilo_read": 0.0004,
    }),
    "tiny": Case(Workload(conversations=30, rate=8.0, think_s=0.3), 64, {
        "fixed_s": 0.002, "chunk_fixed_s": 0.001, "s_per_token": 0.00002, "s_per_row": 0.0001,
        "s_per_kilo_pair": 0.000003, "s_per_kilo_read": 0.00003,
    }),
    "gpu": Case(Workload(conversations=80, rate=20.0, think_s=0.5, first_tokens=2000), 512, {
        "fixed_s": 0.008, "s_per_token": 0.00004, "s_per_row": 0.00003, "s_per_kilo_pair": 0.000002,
        "s_per_kilo_read": 0.00005,
    }, {"step_tokens": 4096, "lone_step_tokens": 16_384}),
}  # fmt: skip


def play(case: Case, arm: str, seed: int) -> Round:
    policy, _, target = arm.rpartition("-")
    settings: dict[str, Any] = {**case.costs, **case.sizes}
    machine = VirtualServer(
        hbm_blocks=2 * case.workload.tokens // 32, dram_blocks=4000, disk_blocks=0, policy=policy, window=8,
        max_seqs=32, itl_target_s=None if target == "auto" else float(target) / 1e3,
        least_chunk_tokens=case.least_chunk_tokens,
        prefer_contiguous=True, bytes_per_token=12_288, dram_bytes_per_s=4e9, **settings,
    )  # fmt: skip
    simulation = Simulation(machine=machine, conversations=case.workload.arrivals(seed), rng=random.Random(seed))
    simulation.run()
    begun: set[str] = set()
    ttft_s: dict[bool, list[float]] = {False: [], True: []}
    tpot_s, gaps_s = [], []
    for record in simulation.records:
        assert record.ttft_s is not None
        ttft_s[record.session_id in begun].append(record.ttft_s)
        begun.add(record.session_id)
        own = [b - a for a, b in pairwise(record.token_s)]
        tpot_s.append(sum(own) / len(own))
        gaps_s += own
    tokens = sum(len(record.token_s) for record in simulation.records)
    return Round(arm, seed, ttft_s[False], ttft_s[True], tpot_s, gaps_s, simulation.now, tokens)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    arguments = parser.parse_args(words)
    console = Console()
    for name in arguments.machine:
        case = CASES[name]
        runs = [(arm, seed) for seed in range(1, arguments.seeds + 1) for arm in arguments.arms]
        rounds = [play(case, *run) for run in track(runs, description=name, console=console, transient=True)]
        summary = poisson.summarize(rounds)
        poisson.show(console, summary)
        show_held(console, summary["held"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
