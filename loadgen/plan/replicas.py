"""Plans a fleet: how many replicas a load needs so that few turns wait longer than they may, and what Redis it needs.

Simulates a few replicas with the gateway's own routing, which stand for a fleet of several sizes, from the least that
could do the work. Their Redis is as fast as their links and holds everything, so that what they ask of it can be read.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from loadgen.fleet import books
from loadgen.fleet.result import summarize
from loadgen.fleet.simulation import FleetConfig, FleetSimulation
from loadgen.fleet.workload import LINK_BYTES_PER_S, SERVER, sessions_per_s
from loadgen.plan.plan import amount, workload
from loadgen.sim import Machine
from loadgen.workloads.synthetic import Distribution
from loadgen.workloads.workload import Conversation, fitted

_SIMULATED = 4  # replicas at most; of a larger fleet, so many with their share of the load
_LEAST_S, _LEAST_SESSIONS = 600.0, 400  # of a simulation
_WARM = 1 / 3  # of it does not count
_GROWTH = 1.15  # from row to row
_ROWS = 8  # at most
_USED = 0.5  # share of Redis' rate to plan for


@dataclass(frozen=True, slots=True)
class FleetRow:
    replicas: int
    ttft_p50_s: float
    ttft_p95_s: float
    moved: float  # share of the turns that were answered elsewhere than at home
    redis_gb_per_s: float  # twice what is loaded and uploaded in the mean
    redis_gb: float  # uploaded within the time that KV is kept


@dataclass(frozen=True, slots=True)
class FleetPlan:
    workload: str
    model: str
    sessions_per_s: float  # that a replica finishes whose batch is always full
    ttft_target_s: float  # of p95
    rows: tuple[FleetRow, ...]  # by ascending number of replicas

    @property
    def chosen(self) -> FleetRow | None:
        """The row with the fewest replicas that meets the target; None if none does."""
        return next((row for row in self.rows if row.ttft_p95_s <= self.ttft_target_s), None)

    def figures(self) -> dict[str, Any]:
        return {**asdict(self), "chosen": asdict(self.chosen) if self.chosen is not None else None}


def plan_replicas(
    machine: Machine, *, rate: float, ttft_target_s: float, ttl_s: float, think_time: str, distribution: Distribution,
    seed: int, progress: Callable[[int], None],
) -> FleetPlan:  # fmt: skip
    """Simulate growing fleets until one meets the target. rate: conversations that begin a second. Conversations end
    before they overflow the window. Raises ValueError."""

    def drawn(sessions: int, rate: float) -> list[Conversation]:
        found = workload(
            machine, sessions=sessions, sessions_per_s=rate, think_time=think_time, distribution=distribution, seed=seed
        )
        return [one for one in (fitted(each, machine.window - 1, 0) for each in found) if one.turns]

    capacity = sessions_per_s(machine, SERVER, drawn(_LEAST_SESSIONS, 1.0))
    replicas = max(1, math.ceil(rate / capacity))
    rows: list[FleetRow] = []
    while len(rows) < _ROWS:
        progress(replicas)
        simulated = min(replicas, _SIMULATED)
        share = rate * simulated / replicas
        duration_s = max(_LEAST_S, _LEAST_SESSIONS / share)
        conversations = drawn(math.ceil(duration_s * share), share)
        rows.append(_row(machine, conversations, duration_s, simulated, replicas, ttl_s, seed))
        if rows[-1].ttft_p95_s <= ttft_target_s:
            break
        replicas = max(replicas + 1, math.ceil(_GROWTH * replicas))
    return FleetPlan(f"{rate:g} sessions a second", machine.name, capacity, ttft_target_s, tuple(rows))


def _row(
    machine: Machine, conversations: list[Conversation], duration_s: float, simulated: int, replicas: int, ttl_s: float,
    seed: int,
) -> FleetRow:  # fmt: skip
    config = FleetConfig(
        replicas=simulated, policy="guarded", machine=machine, server=SERVER, until_s=duration_s, seed=seed,
        redis_bytes_per_s=simulated * LINK_BYTES_PER_S, link_bytes_per_s=LINK_BYTES_PER_S,
    )  # fmt: skip
    fleet = FleetSimulation(conversations, config)
    fleet.run()
    books.check(fleet)
    result = summarize([fleet], from_s=_WARM * duration_s, to_s=duration_s)
    of_all = replicas / simulated / duration_s / 1e9
    uploaded = result.redis_bytes["uploaded"] * of_all
    sent = sum(result.routes.get(route, 0) for route in ("home", "new", "moved"))
    return FleetRow(
        replicas=replicas,
        ttft_p50_s=result.ttft_p50_s,
        ttft_p95_s=result.ttft_p95_s,
        moved=result.routes.get("moved", 0) / sent,
        redis_gb_per_s=(result.redis_bytes["loaded"] * of_all + uploaded) / _USED,
        redis_gb=uploaded * ttl_s,
    )


def table(plan: FleetPlan) -> Table:
    shown = Table(
        "", "replicas", "TTFT p50, s", "TTFT p95, s", "moved turns, %", "Redis GB/s", "Redis GB",
        title=f"{plan.workload}; {plan.model}",
        caption=f"*: the fewest whose p95 is at most {plan.ttft_target_s:g} s. A replica with a full batch finishes "
        f"{plan.sessions_per_s:.3g} sessions a second. Redis: GB/s is twice the mean of loads and uploads, GB what is "
        "uploaded within the TTL.",
    )  # fmt: skip
    for row in plan.rows:
        is_chosen = row == plan.chosen
        shown.add_row(
            "*" if is_chosen else "", str(row.replicas), f"{row.ttft_p50_s:.3f}", f"{row.ttft_p95_s:.3f}",
            f"{100 * row.moved:.1f}", amount(row.redis_gb_per_s), amount(row.redis_gb),
            style="bold green" if is_chosen else None,
        )  # fmt: skip
    return shown
