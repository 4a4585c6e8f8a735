"""Computes how many replicas a fleet needs, from what it measures. Ray's autoscaler, a metric and the fleet simulator
use this code. Pure: no clock and no I/O.

A fleet grows when turns wait longer than half of the time that is aimed at for a first token. It also grows when the
sessions no longer fit into the replicas' DRAM: hits there fall and turns wait for loads. It shrinks when the fleet
without one replica would still hardly wait, and Redis has room for that replica's sessions.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 30.0
_LONG, _SHORT = (
    1 / 2,
    1 / 5,
)  # shares of the TTFT target: waits above the first call for replicas, below the second allow fewer
_BUSIEST = 0.7  # share of time in which replicas that are too busy to predict a wait should compute prompts
_STEP = 1.5  # a fleet grows at once to at most so many times its size
_FALLEN = 0.8  # DRAM hits that have fallen to this share of their usual are too few
_EXPOSED = 0.1  # share of turns that wait for loads, which is too many


@dataclass(frozen=True, slots=True)
class Signals:
    """The measurements of a fleet over the last `WINDOW_S`."""

    replicas: int  # replicas that serve
    wait_p90_s: float  # predicted waits of newcomers, over replicas and time
    busy: float  # share of their time in which replicas compute prompts, in the mean
    dram_share: float = 1.0  # share of history tokens that were found in DRAM or HBM
    usual_dram_share: float = 0.0  # share of DRAM hits over the last hour
    exposed_share: float = 0.0  # share of turns that waited for their loads
    redis_free_bytes: float = math.inf
    least_held_bytes: float = 0.0  # KV of the replica that would leave, which is not in Redis yet


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_target_s: float
    least: int = 1
    most: int = 1000


def wanted(signals: Signals, limits: Limits) -> int:
    """Return the number of replicas that the fleet should have."""
    have = signals.replicas
    most = min(limits.most, max(have + 1, math.ceil(_STEP * have)))
    if have < limits.least:
        return limits.least
    if signals.wait_p90_s > _LONG * limits.ttft_target_s:
        enough = (n for n in range(have + 1, most) if predicted_wait_s(signals, n) <= _LONG * limits.ttft_target_s)
        return min(most, next(enough, most))
    is_too_small = signals.dram_share < _FALLEN * signals.usual_dram_share and signals.exposed_share > _EXPOSED
    if is_too_small:
        return min(most, have + 1)
    if (
        have > limits.least
        and predicted_wait_s(signals, have - 1) < _SHORT * limits.ttft_target_s
        and signals.redis_free_bytes >= signals.least_held_bytes
    ):
        return max(limits.least, min(have - 1, limits.most))
    return min(have, limits.most)


def predicted_wait_s(signals: Signals, replicas: int) -> float:
    """Return the wait, in seconds, that the same work would have on another number of replicas. The wait grows as busy
    / (1 - busy), as in a queue with random arrivals, where busy is the share of time in which replicas compute. Returns
    math.inf for replicas that would always compute. A fleet that is never idle does not show how long its wait will
    grow: for it, returns the measured wait for a number of replicas that would be busy more than 70 % of the time, and
    0 for a larger number."""
    if replicas <= 0:
        return math.inf
    busy = signals.busy * signals.replicas / replicas
    if signals.busy >= 1.0:
        return signals.wait_p90_s if busy > _BUSIEST else 0.0
    if busy >= 1.0:
        return math.inf
    if signals.busy <= 0.0:
        return signals.wait_p90_s
    return signals.wait_p90_s * (busy / (1 - busy)) / (signals.busy / (1 - signals.busy))


class WaitWindow:
    """The waits that replicas predicted within the last `WINDOW_S`, and their p90. Keeps at most `most` samples."""

    def __init__(self, *, most: int) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=most)  # (when, seconds)

    def add(self, waits_s: Iterable[float], now: float) -> None:
        self._samples.extend((now, wait_s) for wait_s in waits_s)
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()

    def p90_s(self) -> float:
        """Return the 90th percentile of the waits in seconds; 0 if there are none."""
        waits_s = sorted(wait_s for _, wait_s in self._samples)
        return waits_s[min(len(waits_s) - 1, int(0.9 * len(waits_s)))] if waits_s else 0.0
