"""Prometheus metrics in a registry of their own: what the app measures, and what the engine reports about itself."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import SchedulerState

if TYPE_CHECKING:
    from app.generation import Choice, Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """Of one app. Observed on the event loop only."""

    def __init__(self, *, engine: "Engine", active: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "reprise_requests",
            "HTTP requests by route and status; 499 is a client that left.",
            ("route", "status"),
            registry=self._registry,
        )
        self.failures = Counter(
            "reprise_failed_generations",
            "Generations the engine refused or lost, also in the middle of a stream, by error code.",
            ("code",),
            registry=self._registry,
        )
        self.ttft = self._histogram("reprise_ttft_seconds", "Arrival of a request to a choice's first token.", SECONDS)
        self.itl = self._histogram("reprise_itl_seconds", "Gap between two tokens of a choice.", TOKEN_SECONDS)
        self.tpot = self._histogram("reprise_tpot_seconds", "Mean gap after a choice's first token.", TOKEN_SECONDS)
        self.e2e = self._histogram("reprise_e2e_seconds", "Arrival of a request to its last byte.", SECONDS)
        self.queue = self._histogram("reprise_queue_seconds", "Arrival in the engine to the first step.", SECONDS)
        self.load = self._histogram("reprise_load_seconds", "Loading KV from lower tiers.", SECONDS)
        self.prefill = self._histogram("reprise_prefill_seconds", "First step to first token.", SECONDS)
        answers = Gauge("reprise_active_requests", "Generation requests that the app holds.", registry=self._registry)
        answers.set_function(active)
        self._registry.register(EngineCollector(engine=engine))

    def choice_done(self, choice: "Choice") -> None:
        """A choice ended by itself, not by an error or because its client left."""
        if choice.timings is not None:
            self.queue.observe(choice.timings.queue_ms / 1e3)
            self.load.observe(choice.timings.load_ms / 1e3)
            self.prefill.observe(choice.timings.prefill_ms / 1e3)
        if len(choice.token_ids) > 1 and choice.first_token_s is not None and choice.last_token_s is not None:
            self.tpot.observe((choice.last_token_s - choice.first_token_s) / (len(choice.token_ids) - 1))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, buckets=buckets, registry=self._registry)


class EngineCollector(Collector):
    """The engine's last heartbeat. Its totals begin anew with every engine process, as Prometheus counters may."""

    def __init__(self, *, engine: "Engine") -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily("reprise_engine_up", "1 while the engine takes requests.", engine.state == "ready")
        yield CounterMetricFamily("reprise_engine_restarts", "Engine processes started anew.", engine.restarts)
        stats = engine.stats
        if stats is None:
            return
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
        counters: tuple[tuple[str, str, float], ...] = (
            ("steps", "Batches run.", stats.steps),
            ("step_seconds", "Time spent in batches.", stats.step_seconds),
            ("generated_tokens", "Tokens sampled.", stats.generated_tokens),
            ("evicted_blocks", "Blocks that left HBM to make room.", stats.evicted_blocks),
            ("offloaded_blocks", "Of these, in the background.", stats.offloaded_blocks),
            ("preemptions", "Sequences sent back to the queue.", stats.preemptions),
            ("aborted_requests", "Requests whose client left.", stats.aborted),
            ("kv_load_seconds", "Time that loads of KV into HBM took.", stats.load_seconds),
            ("kv_load_wait_seconds", "Part of it that no computation hid.", stats.load_wait_seconds),
            ("truncated_tokens", "History tokens dropped because a window was full.", stats.truncated_tokens),
            ("verified_loads", "Loads compared with a recompute.", stats.verified_loads),
            ("verify_mismatches", "Of those, loads that disagreed.", stats.verify_mismatches),
        )
        for name, help_text, value in counters:
            yield CounterMetricFamily(f"reprise_{name}", help_text, value)
        yield from _scheduler(stats.scheduler)
        if stats.load_seconds > 0:
            hidden = max(0.0, 1 - stats.load_wait_seconds / stats.load_seconds)
            yield GaugeMetricFamily("reprise_kv_load_overlap_ratio", "Share of load time hidden since start.", hidden)
        tier_gauges: tuple[tuple[str, str, Mapping[str, float]], ...] = (
            ("tier_bytes", "KV in a tier.", stats.tier_bytes),
            ("tier_capacity_bytes", "Hard cap of a tier.", stats.tier_capacity),
        )
        for name, help_text, values in tier_gauges:
            yield _labelled(GaugeMetricFamily(f"reprise_{name}", help_text, labels=["tier"]), values)
        labelled: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
            ("prompt_tokens", "Prompt tokens by where their KV was.", "outcome", stats.prompt_tokens),
            ("miss_tokens", "Computed prompt tokens by reason.", "reason", stats.miss_tokens),
            ("moved_bytes", "KV moved between tiers.", "direction", stats.moved_bytes),
            ("moved_seconds", "Time of the threads that moved it.", "direction", stats.moved_seconds),
            ("tier_evictions", "Blocks that left a tier to make room.", "tier", stats.evictions),
            ("refused_blocks", "Blocks that a tier had no room for.", "tier", stats.refused),
            ("tier_write_failures", "Writes that a tier refused or failed in.", "tier", stats.write_failures),
            ("load_failures", "Loads that became a recompute.", "reason", stats.load_failures),
        )
        for name, help_text, label, values in labelled:
            yield _labelled(CounterMetricFamily(f"reprise_{name}", help_text, labels=[label]), values)


def _scheduler(state: SchedulerState | None) -> Iterator[Metric]:
    if state is None:
        return
    waiting = GaugeMetricFamily("reprise_waiting_by_class", "Requests in line by CaR's class.", labels=["class"])
    yield _labelled(waiting, state.waiting)
    yield GaugeMetricFamily("reprise_window_places", "Places of the shuffled window.", state.window)
    yield GaugeMetricFamily(
        "reprise_length_prediction_error", "Mean error of predicted answers over mean length.", state.prediction_error
    )
    yield CounterMetricFamily(
        "reprise_overtakes", "Starts before one that entered the window earlier.", state.overtakes
    )
    help_text = "Preemptions for a tenant who had nothing running."
    yield CounterMetricFamily("reprise_fair_preemptions", help_text, state.fair_preemptions)
    timer = CounterMetricFamily("reprise_prefetch_timer", "Loads started ahead, by how it came.", labels=["outcome"])
    yield _labelled(timer, state.timer)
    loads = CounterMetricFamily("reprise_started_loads", "Loads at the start of their request.", labels=["outcome"])
    yield _labelled(loads, state.loads)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family
