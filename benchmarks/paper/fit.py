"""Fits what AttentionStore leaves open of its backlog to its LRU and FIFO points, and to nothing else:
benchmarks/results/fit_paper.json.

    python -m benchmarks.paper.fit                          FITTED, and whether a step from it is better
    python -m benchmarks.paper.fit --steps 8                a walk to where none is
    python -m benchmarks.paper.fit --free turn_shape        what else may change

Least squares over the four hit rates of Fig. 21(a), LRU and FIFO with 2 and 10 TB, all 9,000 sessions, means over
workloads drawn alike. A walk: one unknown one step up or down at a time, whichever is best, since lengths beside a
window of 4K make no smooth slope. Look-ahead and the other models are not run.
"""

import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.paper.figures import PAPER, SEEDS
from reprise.loadgen.sim import presets, simulate
from reprise.loadgen.sim.presets import FITTED, Saturation

POINTS = {("lru", 2): 0.129, ("lru", 10): 0.58, ("first-come", 2): 0.095, ("first-come", 10): 0.48}
STEPS = {
    "opening_tokens": 300.0, "turn_tokens": 50.0, "prompt_share": 0.1, "spread": 0.1, "turn_shape": 0.2,
    "layer_s": 0.05e-3, "hbm_share": 0.05,
}  # fmt: skip
BOUNDS = {
    "opening_tokens": (300, 12_000), "turn_tokens": (200, 4000), "prompt_share": (0.1, 0.9), "spread": (0.0, 1.2),
    "turn_shape": (0.3, 3.0), "layer_s": (0.0, 2e-3), "hbm_share": (0.4, 1.0),
}  # fmt: skip
Rates = dict[tuple[str, int], list[float]]  # per point, of every workload


def hit_rate(shape: Saturation, policy: str, terabytes: int, seed: int) -> float:
    machine = presets.machine(
        "llama-13b", layer_s=shape.layer_s, hbm_share=shape.hbm_share, disk_bytes=terabytes * 1e12
    )
    workload = presets.saturated(seed=seed, shape=shape)
    return simulate(workload, machine, replace(PAPER, policy=policy, prefetch=False)).hit_rate


def hit_rates(pool: Executor, shapes: Sequence[Saturation], seeds: Sequence[int]) -> dict[Saturation, Rates]:
    jobs = {
        (shape, point, seed): pool.submit(hit_rate, shape, *point, seed)
        for shape in shapes
        for point in POINTS
        for seed in seeds
    }
    return {
        shape: {point: [jobs[shape, point, seed].result() for seed in seeds] for point in POINTS} for shape in shapes
    }


def squares(rates: Rates) -> float:
    """The sum of squares of percentage points missed."""
    return sum((100 * (fmean(rates[point]) - rate)) ** 2 for point, rate in POINTS.items())


def beside(shape: Saturation, names: Sequence[str], stride: float) -> list[Saturation]:
    """One step from it, `stride` times what STEPS says, in one unknown."""
    found = []
    for name in names:
        least, most = BOUNDS[name]
        for step in (-stride * STEPS[name], stride * STEPS[name]):
            value = round(min(most, max(least, getattr(shape, name) + step)), 9)
            if value != getattr(shape, name):
                found.append(replace(shape, **{name: value}))
    return found


def measure(run: Run) -> dict[str, Any]:
    """The result is written after every step."""
    arguments, here = run.arguments, replace(FITTED, **run.arguments.start)
    tried: dict[Saturation, Rates] = {}
    with ProcessPoolExecutor(max(1, arguments.workers)) as pool, run.console.status("simulating"):
        for _ in range(arguments.steps):
            shapes = (here, *beside(here, arguments.free, arguments.stride))
            new = [shape for shape in shapes if shape not in tried]
            for shape, rates in hit_rates(pool, new, arguments.seeds).items():
                tried[shape] = rates
                shown = ", ".join(f"{fmean(values):.1%}" for values in rates.values())
                run.console.print(f"{squares(rates):6.1f}  {shown}  {shape}", highlight=False, soft_wrap=True)
            run.keep(_figures(tried, arguments.seeds))
            best = min(tried, key=lambda shape: squares(tried[shape]))
            if best == here:
                break
            here = best
    return _figures(tried, arguments.seeds)


def _figures(tried: dict[Saturation, Rates], seeds: Sequence[int]) -> dict[str, Any]:
    rows = [
        {
            "shape": asdict(shape),
            "squares": round(squares(rates), 2),
            "hit_rates": [[round(rate, 4) for rate in values] for values in rates.values()],
        }
        for shape, rates in sorted(tried.items(), key=lambda entry: squares(entry[1]))
    ]
    return {"points": [[*point, rate] for point, rate in POINTS.items()], "seeds": list(seeds), "tried": rows}


def show(console: Console, result: dict[str, Any]) -> None:
    console.print("best:", result["tried"][0]["shape"])


def unknowns(text: str) -> list[str]:
    """Return the names of the unknowns in a list with commas. Raises argparse.ArgumentTypeError."""
    if not set(text.split(",")) <= STEPS.keys():
        raise ArgumentTypeError(f"what may change is some of {', '.join(STEPS)}")
    return text.split(",")


def values(text: str) -> dict[str, float]:
    """Read `name=value,name=value`, for argparse."""
    return {name: float(value) for name, value in (word.split("=") for word in text.split(",") if word)}


def options(parser: ArgumentParser) -> None:
    names = ", ".join(STEPS)
    parser.add_argument("--steps", type=int, default=1, help="at most")
    parser.add_argument("--stride", type=float, default=1.0, help="times what STEPS says")
    parser.add_argument("--free", type=unknowns, default="opening_tokens,turn_tokens,prompt_share,spread", help=names)
    parser.add_argument("--start", type=values, default="", help="other than FITTED: opening_tokens=4500,spread=0.3")
    parser.add_argument(
        "--seeds", type=lambda text: [int(word) for word in text.split(",")], default=list(SEEDS),
        help="of the workloads",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))


EXPERIMENT = Experiment(name="fit_paper", about=__doc__, measure=measure, show=show, options=options)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
