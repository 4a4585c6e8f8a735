"""Makes Prometheus metrics from the engine's heartbeat."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reprise.app.turn.kv_sources import SOURCES
from reprise.engine.messages import DIVERGENCE_BOUNDS, MISS_REASONS, SchedulerState, Stats

if TYPE_CHECKING:
    from reprise.app.turn.ports import EnginePort

DIRECTIONS = (
    "dram_to_hbm",
    "disk_to_hbm",
    "redis_to_hbm",
    "disk_to_dram",
    "redis_to_dram",
    "hbm_to_dram",
    "dram_to_disk",
    "disk_to_redis",
)
LOWER_TIERS = ("dram", "disk")


class EngineCollector(Collector):
    """A collector of the engine's last heartbeat. Its totals start anew with every engine process, which Prometheus
    counters may do."""

    def __init__(self, *, engine: "EnginePort") -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily("reprise_engine_up", "1 while the engine takes requests.", engine.state == "ready")
        yield CounterMetricFamily("reprise_engine_restarts", "Engine processes started anew.", engine.restarts)
        if (stats := engine.stats) is not None:
            yield from _gauges(stats)
            yield from _totals(stats)
            yield from _scheduler(stats.scheduler)
            yield from _tiers(stats)
            yield from _totals_by_label(stats)
            yield from _codec(stats)


def _gauges(stats: Stats) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, float], ...] = (
        ("running_requests", "Sequences in the batch.", stats.running),
        ("waiting_requests", "Sequences in the queue.", stats.waiting),
        ("sessions", "Sessions the engine knows.", stats.sessions),
        ("leases", "HBM pages pinned by requests; 0 at idle.", stats.leases),
        ("in_flight_transfers", "Saves and loads under way; 0 at idle.", stats.in_flight),
    )
    for name, help_text, value in gauges:
        yield GaugeMetricFamily(f"reprise_{name}", help_text, value)
    pages = {"total": stats.hbm_pages_total, "free": stats.hbm_pages_free, "cached": stats.hbm_pages_cached}
    yield _labelled(
        GaugeMetricFamily("reprise_hbm_pages", "HBM pages; at idle total = free + cached.", labels=["state"]), pages
    )


def _totals(stats: Stats) -> Iterator[Metric]:
    counters: tuple[tuple[str, str, float], ...] = (
        ("steps", "Batches run.", stats.steps),
        ("step_seconds", "Time spent in batches.", stats.step_seconds),
        ("eager_decode_steps", "On CUDA, steps that only decoded and were no graphs.", stats.eager_decode_steps),
        ("generated_tokens", "Tokens sampled.", stats.generated_tokens),
        ("evicted_blocks", "Blocks that left HBM to make room.", stats.evicted_blocks),
        ("offloaded_blocks", "Of these, in the background.", stats.offloaded_blocks),
        ("preemptions", "Sequences sent back to the queue.", stats.preemptions),
        ("aborted_requests", "Requests whose client left.", stats.aborted),
        ("kv_load_seconds", "Time that loads of KV into HBM took.", stats.load_seconds),
        ("kv_load_wait_seconds", "Part of it that no computation hid.", stats.load_wait_seconds),
        ("weight_copy_bytes", "Weights copied from DRAM to HBM.", stats.weight_bytes),
        ("weight_wait_seconds", "Time that layers waited for their weights.", stats.weight_wait_seconds),
        ("truncated_tokens", "History tokens dropped because a window was full.", stats.truncated_tokens),
        ("recalled_tokens", "Dropped tokens brought back because a message was about them.", stats.recalled_tokens),
        ("verified_loads", "Loads compared with a recompute.", stats.verified_loads),
        ("verify_mismatches", "Of those, loads that disagreed.", stats.verify_mismatches),
    )
    for name, help_text, value in counters:
        yield CounterMetricFamily(f"reprise_{name}", help_text, value)


def _tiers(stats: Stats) -> Iterator[Metric]:
    if stats.load_seconds > 0:
        hidden = max(0.0, 1 - stats.load_wait_seconds / stats.load_seconds)
        yield GaugeMetricFamily("reprise_kv_load_overlap_ratio", "Share of load time hidden since start.", hidden)
    gauges: tuple[tuple[str, str, Mapping[str, float]], ...] = (
        ("tier_bytes", "KV in a tier.", stats.tier_bytes),
        ("tier_capacity_bytes", "Hard cap of a tier.", stats.tier_capacity),
        (
            "tier_used",
            "0 while a tier does not answer.",
            {t: t not in stats.tier_problems for t in stats.tier_capacity},
        ),
    )
    for name, help_text, values in gauges:
        yield _labelled(GaugeMetricFamily(f"reprise_{name}", help_text, labels=["tier"]), values)


def _totals_by_label(stats: Stats) -> Iterator[Metric]:
    tokens, misses = _from_zero(SOURCES, stats.prompt_tokens), _from_zero(MISS_REASONS, stats.miss_tokens)
    moved_bytes, moved_s = (_from_zero(DIRECTIONS, moved) for moved in (stats.moved_bytes, stats.moved_seconds))
    evictions = _from_zero(("hbm", *LOWER_TIERS), stats.evictions)
    refused, failed = (_from_zero(LOWER_TIERS, counts) for counts in (stats.refused, stats.write_failures))
    counters: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
        ("prompt_tokens", "Prompt tokens by where their KV was.", "outcome", tokens),
        ("miss_tokens", "Computed prompt tokens by reason.", "reason", misses),
        ("moved_bytes", "KV moved between tiers.", "direction", moved_bytes),
        ("moved_seconds", "Time of the threads that moved it.", "direction", moved_s),
        ("tier_evictions", "Blocks that left a tier to make room.", "tier", evictions),
        ("refused_blocks", "Blocks that a tier had no room for.", "tier", refused),
        ("tier_write_failures", "Writes that a tier refused or failed in.", "tier", failed),
        ("load_failures", "Blocks that a load or a fetch did not bring.", "reason", stats.load_failures),
    )
    for name, help_text, label, values in counters:
        yield _labelled(CounterMetricFamily(f"reprise_{name}", help_text, labels=[label]), values)
    drafted = CounterMetricFamily("reprise_drafted_tokens", "Tokens of drafts.", labels=["source", "outcome"])
    for name, count in stats.drafted_tokens.items():
        drafted.add_metric(name.split(), count)
    yield drafted


def _scheduler(state: SchedulerState | None) -> Iterator[Metric]:
    if state is None:
        return
    cost = {term: seconds for term, seconds in state.step_cost.items() if term != "margin"}
    help_text = "What a step costs: fixed, per token, per thousand pairs, per row, per thousand tokens it reads."
    yield _labelled(GaugeMetricFamily("reprise_step_cost_seconds", help_text, labels=["term"]), cost)
    help_text = "Preemptions for a tenant who had nothing running."
    yield CounterMetricFamily("reprise_fair_preemptions", help_text, state.fair_preemptions)
    loads = CounterMetricFamily("reprise_started_loads", "Loads at the start of their request.", labels=["outcome"])
    yield _labelled(loads, state.loads)


def _codec(stats: Stats) -> Iterator[Metric]:
    checks = stats.codec_checks
    if checks is not None or stats.codec_condemned:
        help_text = "1 while KV is coded, 0 after checks have found that it changes answers too much."
        yield GaugeMetricFamily("reprise_codec_on", help_text, not stats.codec_condemned)
    if checks is None:
        return
    bounds = [*map(str, DIVERGENCE_BOUNDS), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(checks.counts)), strict=True))
    help_text = "Divergence of answers behind coded KV from a recompute, nats a token."
    yield HistogramMetricFamily("reprise_codec_divergence_nats", help_text, buckets=buckets, sum_value=checks.total)


def _from_zero(names: Iterable[str], values: Mapping[str, float]) -> dict[str, float]:
    return {**dict.fromkeys(names, 0.0), **values}


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family
