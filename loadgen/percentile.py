"""What a percentile is, wherever one is reported. Pure."""

import math
from collections.abc import Iterable


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that `share` of them do not exceed, in any order; nan of none."""
    ordered = sorted(values)
    # Without the margin 0.07 * 100 = 7.000000000000001 would be the eighth.
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] if ordered else math.nan
