"""Computes figures from what simulated fleets did."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reprise.loadgen.fleet.simulation import FleetSimulation
from reprise.loadgen.percentile import percentile
from reprise.loadgen.sim.turn import TurnRecord


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Waits, sources of history, routes and bytes of the turns that arrived within a span of time, except for
    continuations of interrupted answers."""

    turns: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tokens: dict[str, float]  # share of the history's tokens, by where they were found; `computed` is the rest
    routes: dict[str, int]  # turns of the whole run by route
    redis_bytes: dict[str, float]  # bytes of the whole run: loaded, uploaded, dropped (too much waited), evicted

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def summarize(fleets: Sequence[FleetSimulation], *, from_s: float, to_s: float) -> FleetResult:
    """Return the figures of the turns of all fleets together that arrived from `from_s` to `to_s`, in seconds since the
    start. Raises ValueError if none did."""
    found = [(record, fleet.ttft_s(record)) for fleet in fleets for record in _within(fleet, from_s, to_s)]
    if not found:
        raise ValueError(f"no turn arrived between {from_s:g} and {to_s:g} s")
    records, ttfts = [record for record, _ in found], sorted(ttft_s for _, ttft_s in found)
    history = max(1, sum(record.history_tokens for record in records))
    tokens = {
        tier: sum(record.sources.get(tier, 0) for record in records) / history
        for tier in ("hbm", "dram", "disk", "redis")
    }
    routes: Counter[str] = Counter()
    for fleet in fleets:
        routes.update(fleet.routes)
    return FleetResult(
        turns=len(records),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        ttft_p99_s=percentile(ttfts, 0.99),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        tokens={**tokens, "computed": 1.0 - sum(tokens.values())},
        routes=dict(sorted(routes.items())),
        redis_bytes={
            name: sum(getattr(fleet.redis, name, 0.0) for fleet in fleets)
            for name in ("loaded", "uploaded", "dropped", "evicted")
        },
    )


def _within(fleet: FleetSimulation, from_s: float, to_s: float) -> Iterator[TurnRecord]:
    """Yield the turns that arrived within the span, but not the continuations of interrupted answers."""
    for record in fleet.records:
        key = record.session_id, record.turn
        first_s = fleet.asked_s.get(key, record.arrived_s)
        is_rest = key in fleet.resumed and record.arrived_s != first_s
        if from_s <= first_s < to_s and not is_rest:
            yield record
