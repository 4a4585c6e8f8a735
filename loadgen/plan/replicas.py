"""Plans a fleet: how many replicas a load needs so that few turns wait longer than they may, and what Redis it needs.

Simulates a few replicas, with the gateway's own routing; they stand for fleets of several sizes. At the start as many
conversations are under way as after a long time: a fleet that begins empty hardly waits for a while, however small it
is. Redis is as fast as the replicas' links and holds everything, so the result shows how much of it the fleet needs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from reprise.loadgen.fleet import books
from reprise.loadgen.fleet.result import summarize
from reprise.loadgen.fleet.simulation import FleetConfig, FleetSimulation
from reprise.loadgen.fleet.workload import LINK_BYTES_PER_S, SERVER, already_under_way, lifetime_s, sessions_per_s
from reprise.loadgen.plan.plan import amount, workload
from reprise.loadgen.sim import Machine
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation, fitted

_SIMULATED = 4  # replicas at most; of a larger fleet, so many with their share of the load
_LEAST_S, _LEAST_SESSIONS = 600.0, 400  # least length of a simulation
_DRAWS = (
    4  # draws of conversations, whose turns count together: near its limit, a fleet's wait differs much between draws
)
_WARM = 1 / 3  # share of a simulation that does not count
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
    sessions_per_s: float  # what a replica finishes whose batch is always full
    ttft_target_s: float  # target of the p95
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
    """Find by simulation how many replicas keep the 95th percentile of TTFT within `ttft_target_s`. The first fleet has
    as many replicas as the rate needs at least. While a fleet misses the target, a larger one is simulated. If the
    first fleet meets the target, smaller ones are simulated until one misses it. rate: conversations that begin per
    second; each is cut before the turn that would overflow the window. progress: called with the number of replicas
    before each simulation. Raises ValueError."""

    def drawn(sessions: int, rate: float, seed: int) -> list[Conversation]:
        found = workload(
            machine, sessions=sessions, sessions_per_s=rate, think_time=think_time, distribution=distribution, seed=seed
        )
        return [one for one in (fitted(each, machine.window - 1, 0) for each in found) if one.turns]

    sample = drawn(_LEAST_SESSIONS, 1.0, seed)
    capacity = sessions_per_s(machine, SERVER, sample)
    since_s = max(lifetime_s(one, machine) for one in sample)

    def row(replicas: int) -> FleetRow:
        progress(replicas)
        simulated = min(replicas, _SIMULATED)
        share = rate * simulated / replicas
        duration_s = max(_LEAST_S, _LEAST_SESSIONS / share)
        config = FleetConfig(
            replicas=simulated, machine=machine, server=SERVER, until_s=duration_s, seed=seed,
            redis_bytes_per_s=simulated * LINK_BYTES_PER_S, link_bytes_per_s=LINK_BYTES_PER_S,
        )  # fmt: skip
        fleets: list[FleetSimulation] = []
        for number in range(_DRAWS):
            begun = drawn(math.ceil((since_s + duration_s) * share), share, seed + number)
            conversations, histories = already_under_way(begun, machine, since_s=since_s)
            fleets.append(FleetSimulation(conversations, config, histories=histories))
            fleets[-1].run()
            books.check(fleets[-1])
        return _row(fleets, replicas, ttl_s)

    rows = [row(max(1, math.ceil(rate / capacity)))]
    while len(rows) < _ROWS and rows[-1].ttft_p95_s > ttft_target_s:
        rows.append(row(max(rows[-1].replicas + 1, math.ceil(_GROWTH * rows[-1].replicas))))
    while len(rows) < _ROWS and rows[0].replicas > 1 and rows[0].ttft_p95_s <= ttft_target_s:
        rows.insert(0, row(min(rows[0].replicas - 1, math.floor(rows[0].replicas / _GROWTH))))
    return FleetPlan(f"{rate:g} sessions a second", machine.name, capacity, ttft_target_s, tuple(rows))


def _row(fleets: Sequence[FleetSimulation], replicas: int, ttl_s: float) -> FleetRow:
    config = fleets[0].config
    result = summarize(fleets, from_s=_WARM * config.until_s, to_s=config.until_s)
    of_all = replicas / config.replicas / config.until_s / len(fleets) / 1e9
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
