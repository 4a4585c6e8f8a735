"""Fits what AttentionStore leaves open of its backlog to its LRU and FIFO points, and to nothing else:
benchmarks/results/fit_paper.json. Of what the four points do not tell apart (how long a decode step takes beside its
reads), `loadgen.sim.presets.FITTED` has the simplest.

    python -m benchmarks.fit_paper              from FITTED on
    python -m benchmarks.fit_paper --steps 4    more of them
    python -m benchmarks.fit_paper --free turn_shape,turn_tokens    what may change

Least squares over the four hit rates of Fig. 21(a), LRU and FIFO with 2 and 10 TB, all 9,000 sessions: Gauss and Newton
with differences, damped, so that among settings as good as each other the nearest wins. Look-ahead and the other models
are not run.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures_paper import PAPER
from benchmarks.servers import write_result
from loadgen.sim import presets, simulate
from loadgen.sim.presets import FITTED, Saturation

POINTS = {("lru", 2): 0.129, ("lru", 10): 0.58, ("first-come", 2): 0.095, ("first-come", 10): 0.48}
DIFFERENCES = {"opening_tokens": -1000.0, "turn_tokens": -200.0, "spread": 0.2, "turn_shape": 0.2, "layer_s": 0.1e-3}
BOUNDS = {
    "opening_tokens": (300, 12_000), "turn_tokens": (200, 4000), "spread": (0.0, 1.2), "turn_shape": (0.3, 3.0),
    "layer_s": (0.0, 2e-3),
}  # fmt: skip
DAMPING = 1e-4  # of a step of one difference, beside squares of hit rates
MOST = 3.0  # differences in one step


def hit_rate(shape: Saturation, policy: str, terabytes: int, seed: int) -> float:
    machine = presets.machine("llama-13b", layer_s=shape.layer_s, disk_bytes=terabytes * 1e12)
    workload = presets.saturated(seed=seed, shape=shape)
    return simulate(workload, machine, replace(PAPER, policy=policy, prefetch=False)).hit_rate


def measured(pool: Executor, shapes: Sequence[Saturation], seed: int) -> list[list[float]]:
    """Per shape, the hit rates of `POINTS`."""
    jobs = [pool.submit(hit_rate, shape, *point, seed) for shape in shapes for point in POINTS]
    rates = iter([job.result() for job in jobs])
    return [[next(rates) for _ in POINTS] for _ in shapes]


def moved(shape: Saturation, differences: dict[str, float]) -> Saturation:
    return replace(
        shape,
        **{
            name: min(BOUNDS[name][1], max(BOUNDS[name][0], getattr(shape, name) + difference))
            for name, difference in differences.items()
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--free", default="opening_tokens,turn_tokens,spread,layer_s", help=", ".join(DIFFERENCES))
    parser.add_argument("--start", default="", help="other than FITTED: opening_tokens=4509,spread=0.26")
    parser.add_argument("--result", default="fit_paper", help="name of the result file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    words = parser.parse_args()
    console = Console()
    targets = np.array(list(POINTS.values()))
    tried: list[dict[str, Any]] = []

    def noted(shape: Saturation, rates: Sequence[float]) -> None:
        missed = float(((np.array(rates) - targets) ** 2).sum()) * 1e4
        tried.append({"shape": asdict(shape), "hit_rates": [round(rate, 4) for rate in rates], "squares": missed})
        console.print(f"{missed:6.1f}  {', '.join(f'{rate:.1%}' for rate in rates)}  {shape}", highlight=False)

    shape = replace(
        FITTED, **{name: float(value) for name, value in (w.split("=") for w in words.start.split(",") if w)}
    )
    names = words.free.split(",")
    if not DIFFERENCES.keys() >= set(names):
        parser.error(f"what may change is some of {', '.join(DIFFERENCES)}")
    with ProcessPoolExecutor(max(1, words.workers)) as pool:
        for _ in range(words.steps):
            beside = [moved(shape, {name: DIFFERENCES[name]}) for name in names]
            found = measured(pool, [shape, *beside], words.seed)
            for one, rates in zip([shape, *beside], found, strict=True):
                noted(one, rates)
            here = np.array(found[0])
            units = [
                (getattr(one, name) - getattr(shape, name)) / DIFFERENCES[name] or 1.0
                for name, one in zip(names, beside, strict=True)
            ]
            slopes = np.array([(np.array(rates) - here) / unit for rates, unit in zip(found[1:], units, strict=True)]).T
            step = np.linalg.solve(slopes.T @ slopes + DAMPING * np.eye(len(names)), slopes.T @ (targets - here))
            clipped = np.clip(step, -MOST, MOST)
            shape = moved(shape, {n: float(x) * DIFFERENCES[n] for n, x in zip(names, clipped, strict=True)})
        noted(shape, measured(pool, [shape], words.seed)[0])
    tried.sort(key=lambda one: one["squares"])
    console.print("best:", tried[0]["shape"])
    write_result(
        words.result,
        {"points": [[*point, rate] for point, rate in POINTS.items()], "seed": words.seed, "tried": tried},
    )


if __name__ == "__main__":
    main()
