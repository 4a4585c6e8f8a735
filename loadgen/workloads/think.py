"""Models how long people think between an answer and their next message."""

import csv
import math
import random
from collections.abc import Callable
from pathlib import Path

ThinkTime = Callable[[random.Random], float]  # seconds


def parse(text: str) -> ThinkTime:
    """Parse `lognormal:MEDIAN,SIGMA`, `fixed:SECONDS`, or `file:PATH`, followed by `#COLUMN` if the file has several
    columns of seconds. Raises ValueError, and OSError if the file cannot be read."""
    kind, _, rest = text.partition(":")
    if kind == "lognormal":
        median_s, sigma = _numbers(text, rest, 2)
        return lambda rng: median_s * math.exp(rng.gauss(0.0, sigma))
    if kind == "fixed":
        (seconds,) = _numbers(text, rest, 1)
        return lambda rng: seconds
    if kind == "file":
        path, _, column = rest.partition("#")
        points = _percentiles(Path(path), column)
        return lambda rng: _between(points, 100 * rng.random())
    raise ValueError(f"{text!r} is not lognormal:MEDIAN,SIGMA, fixed:SECONDS or file:PATH[#COLUMN]")


def _numbers(text: str, rest: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{text!r}: expected {count} numbers of at least 0 after the colon")
    return numbers


def _percentiles(path: Path, column: str) -> list[tuple[float, float]]:
    """Read (percentile, seconds) in order from a file with a header and a column `percentile`."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in (rows[0] if rows else {}) if name != "percentile"]
    if not rows or "percentile" not in rows[0] or not columns:
        raise ValueError(f"{path} has no column `percentile` beside one of seconds")
    if not column and len(columns) > 1:
        raise ValueError(f"{path} has several columns: append #{columns[0]} or another one to its name")
    if column and column not in columns:
        raise ValueError(f"{path} has no column {column!r}, but {', '.join(columns)}")
    try:
        return sorted((float(row["percentile"]), float(row[column or columns[0]])) for row in rows)
    except (TypeError, ValueError):
        raise ValueError(f"{path} holds something that is not a number") from None


def _between(points: list[tuple[float, float]], percentile: float) -> float:
    """Interpolate linearly between the points; beyond the ends, return the first or the last."""
    below = points[0]
    for point in points:
        if point[0] >= percentile:
            width = point[0] - below[0]
            return point[1] if width <= 0 else below[1] + (point[1] - below[1]) * (percentile - below[0]) / width
        below = point
    return below[1]
