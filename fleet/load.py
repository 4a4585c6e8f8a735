"""Computes from an engine's counts how busy a replica is, for its beat (its report to the fleet). Pure: no clock and no
I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

from reprise.engine.messages import ModelInfo, Stats
from reprise.fleet.routing import Beat

FULL = 0.9  # share of a tier's capacity; below it nothing has to leave
ROOMY_S = 1e9  # how long a session stays in a tier that is not full


@dataclass(frozen=True, slots=True)
class Before:
    """The engine's counts at the previous beat, from which the next beat computes its rates."""

    at_s: float  # monotonic clock
    step_seconds: float
    moved_bytes: Mapping[str, int]


def counted(stats: Stats, at_s: float) -> Before:
    return Before(at_s, stats.step_seconds, stats.moved_bytes)


def load_of(stats: Stats, model: ModelInfo, before: Before | None, now: float, *, draining: bool) -> Beat:
    """Return the part of a replica's beat by which gateways predict how long a turn takes there. before: counts at the
    previous beat; None at the first one, when no rates of change are known."""
    state = stats.scheduler
    cost = state.step_cost if state is not None else {}
    starts = [info.expected_start_s or 0.0 for info in state.front] if state is not None else []
    elapsed_s = now - before.at_s if before is not None else 0.0
    return Beat(
        # A request that comes now starts after the last of the front; those beyond the front are taken to wait as long
        # again.
        wait_s=max(starts, default=0.0) * max(1.0, stats.waiting / max(1, len(starts))),
        s_per_token=cost.get("per_token", 0.0),
        s_per_kilo_pair=cost.get("per_kilo_pair", 0.0),
        kv_bytes_per_token=float(model.kv_bytes_per_token),
        dram_bytes_per_s=_rate(stats, "dram_to_hbm"),
        disk_bytes_per_s=_rate(stats, "disk_to_hbm"),
        # Uploads go the same way; until a load was measured they tell best that, and how fast, KV comes from Redis.
        redis_bytes_per_s=_rate(stats, "redis_to_hbm") or _rate(stats, "disk_to_redis"),
        dram_kept_s=_kept_s(stats, "dram", "hbm_to_dram", before, elapsed_s),
        disk_kept_s=_kept_s(stats, "disk", "dram_to_disk", before, elapsed_s),
        busy=min(1.0, max(0.0, stats.step_seconds - before.step_seconds) / elapsed_s)
        if before is not None and elapsed_s > 0
        else 0.0,
        draining=draining,
    )


def _rate(stats: Stats, direction: str) -> float:
    """Return the measured bytes a second of moves in a direction, such as `dram_to_hbm`; 0 if nothing was moved."""
    seconds = stats.moved_seconds.get(direction, 0.0)
    return stats.moved_bytes.get(direction, 0) / seconds if seconds > 0 else 0.0


def _kept_s(stats: Stats, tier: str, direction: str, before: Before | None, elapsed_s: float) -> float:
    """Return how many seconds KV stays in a tier after its use: infinite while there is room, else the time in which as
    much arrives as the tier holds; 0 without the tier."""
    capacity = stats.tier_capacity.get(tier, 0)
    if not capacity:
        return 0.0
    if stats.tier_bytes.get(tier, 0) < FULL * capacity or before is None or elapsed_s <= 0:
        return ROOMY_S
    came = stats.moved_bytes.get(direction, 0) - before.moved_bytes.get(direction, 0)
    return capacity * elapsed_s / came if came > 0 else ROOMY_S
