"""The parts that benchmarks share: where requests go and figures made of samples."""

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.servers import ServerProcess
from reprise.loadgen.measure.sender import Target, TurnResult
from reprise.loadgen.percentile import percentile

HEARTBEAT_S = 1.3  # the scheduler's state is as old as the last one


def target_of(server: ServerProcess) -> Target:
    return Target(server.url, server.model["id"], {}, {"temperature": 0, "ignore_eos": True})


def fail_on(results: Sequence[TurnResult]) -> None:
    """Raise RuntimeError if one of the results is a failure."""
    errors = [result.error for result in results if result.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} turns failed, the first with {errors[0]}")


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def interval(figure: Callable[[random.Random], float], draws: int) -> tuple[float, float]:
    """Return the 95 % interval of a figure by bootstrap. figure: draws a resample with the given generator and computes
    the figure of it. draws: number of resamples."""
    rng = random.Random(0)
    found = [figure(rng) for _ in range(draws)]
    return percentile(found, 0.025), percentile(found, 0.975)


def median_interval(values: Sequence[float], draws: int) -> tuple[float, float]:
    """Return the 95 % interval of the median of these values by bootstrap. draws: number of resamples."""
    return interval(lambda rng: median(rng.choices(values, k=len(values))), draws)


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None or value != value else round(value, digits)


def ratio(over: float | None, under: float | None) -> float | None:
    return round(over / under, 4) if over is not None and under else None


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return the median, the least and the greatest of the values."""
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Return the median of the ratios `over` / `under`, taken round by round, and the least and the greatest of
    them."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return {"ratio": median(ratios), "ratio_range": [min(ratios), max(ratios)]}
