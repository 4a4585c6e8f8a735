"""What a simulated fleet did, in figures."""

from dataclasses import asdict, dataclass
from typing import Any

from loadgen.fleet.simulation import FleetSimulation
from loadgen.percentile import percentile
from loadgen.sim.turn import TurnRecord


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Covers the turns that arrived within a span of time, but for interrupted answers that went on elsewhere."""

    turns: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tokens: dict[str, float]  # share of the history's tokens, by where they were found; `computed` is the rest
    routes: dict[str, int]  # of the whole run
    redis_bytes: dict[str, float]  # of the whole run: loaded, uploaded, dropped (too much waited), evicted

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def summarize(fleet: FleetSimulation, *, from_s: float, to_s: float) -> FleetResult:
    """Raises ValueError if no turn arrived within the span."""

    def counts(record: TurnRecord) -> bool:
        key = record.session_id, record.turn
        first = fleet.asked_s.get(key, record.arrived_s)
        return from_s <= first < to_s and not (key in fleet.resumed and record.arrived_s != first)

    records = [record for record in fleet.records if counts(record)]
    if not records:
        raise ValueError(f"no turn arrived between {from_s:g} and {to_s:g} s")
    ttfts = sorted(fleet.ttft_s(record) for record in records)
    history = max(1, sum(record.history_tokens for record in records))
    tokens = {
        tier: sum(record.sources.get(tier, 0) for record in records) / history
        for tier in ("hbm", "dram", "disk", "redis")
    }
    redis = fleet.redis
    return FleetResult(
        turns=len(records),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        ttft_p99_s=percentile(ttfts, 0.99),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        tokens={**tokens, "computed": 1.0 - sum(tokens.values())},
        routes=dict(sorted(fleet.routes.items())),
        redis_bytes={name: getattr(redis, name, 0.0) for name in ("loaded", "uploaded", "dropped", "evicted")},
    )
