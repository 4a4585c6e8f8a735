"""Defines the percentile for everything that reports one. Pure."""

import math
from collections.abc import Iterable


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest of the values that at least `share` (0 to 1) of all values do not exceed. Values in any
    order; nan if there are none."""
    ordered = sorted(values)
    # Without the margin, 0.07 * 100 = 7.000000000000001 would give the eighth value.
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] if ordered else math.nan
