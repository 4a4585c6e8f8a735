"""Prometheus metrics in a registry of their own: what the app measures, and what the engine reports about itself.

Labels whose values are known are there from the start, at zero: a rate over a counter that has just appeared misses its
first increase.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.version import version
from engine.messages import SchedulerState

if TYPE_CHECKING:
    from app.conversations.redis_store import RedisStore
    from app.turn.generation import Answer, EnginePort

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
CACHED = ("hbm", "dram", "disk", "redis")
HISTORY_OUTCOMES = (*CACHED, "computed", "truncated", "shifted")
MISS_REASONS = (
    *(
        "new",
        "evicted",
        "expired",
        "diverged",
        "last_token",
        "fingerprint",
        "salt",
        "load_failed",
        "load_late",
        "lineage_reset",
    ),
    *("cheaper_to_recompute", "truncated", "disabled"),
)
DIRECTIONS = ("dram_to_hbm", "disk_to_hbm", "disk_to_dram", "hbm_to_dram", "dram_to_disk")
LOWER_TIERS = ("dram", "disk")


class Metrics:
    """Of one app. Observed on the event loop only."""

    def __init__(self, *, engine: "EnginePort", active: Callable[[], int]) -> None:
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
        self.ttft_by_source = Histogram(
            "reprise_ttft_by_source_seconds",
            "The same, by where most of the prompt's KV came from.",
            ("source",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.history = Counter(
            "reprise_history_tokens",
            "Tokens of earlier turns, per request, by what became of them: found in a tier, computed again, truncated "
            "(no longer in the context). Those shifted are among the found ones, at a new position.",
            ("outcome",),
            registry=self._registry,
        )
        for source in (*CACHED, "computed"):
            self.ttft_by_source.labels(source)
        for outcome in HISTORY_OUTCOMES:
            self.history.labels(outcome)
        self.prompts = self._histogram("reprise_prompt_length_tokens", "Prompt as it stood in the context.", TOKENS)
        self.answers = self._histogram("reprise_answer_length_tokens", "Answer of a choice that ended.", TOKENS)
        self.itl = self._histogram("reprise_itl_seconds", "Gap between two tokens of a choice.", TOKEN_SECONDS)
        self.tpot = self._histogram("reprise_tpot_seconds", "Mean gap after a choice's first token.", TOKEN_SECONDS)
        self.e2e = self._histogram("reprise_e2e_seconds", "Arrival of a request to its last byte.", SECONDS)
        self.queue = self._histogram("reprise_queue_seconds", "Arrival in the engine to the first step.", SECONDS)
        self.load = self._histogram("reprise_load_seconds", "Loading KV from lower tiers.", SECONDS)
        self.prefill = self._histogram("reprise_prefill_seconds", "First step to first token.", SECONDS)
        answers = Gauge("reprise_active_requests", "Generation requests that the app holds.", registry=self._registry)
        answers.set_function(active)
        Info("reprise_build", "What runs.", registry=self._registry).info({"version": version()})
        ProcessCollector("reprise", registry=self._registry)  # the app's processor time, memory and open files
        self._registry.register(EngineCollector(engine=engine))

    def follow(self, redis: "RedisStore") -> None:
        """Tell of it too."""
        self._registry.register(RedisCollector(redis))

    def first_token(self, choice: "Answer", ttft_s: float) -> None:
        """A choice has begun; it paid for what its report says."""
        self.ttft.observe(ttft_s)
        report = choice.report
        if report is None:
            return
        found = {tier: getattr(report, f"{tier}_tokens") for tier in CACHED}
        largest = max(found, key=lambda tier: found[tier])
        cached = sum(found.values())
        self.ttft_by_source.labels(largest if cached >= report.computed_tokens else "computed").observe(ttft_s)
        self.prompts.observe(report.prompt_tokens)
        computed = max(0, report.history_tokens - cached)
        outcomes = {
            **found,
            "computed": computed,
            "truncated": report.truncated_tokens,
            "shifted": report.shifted_tokens,
        }
        for outcome, tokens in outcomes.items():
            self.history.labels(outcome).inc(tokens)

    def choice_done(self, choice: "Answer") -> None:
        """A choice ended by itself, not by an error or because its client left."""
        if choice.timings is not None:
            self.queue.observe(choice.timings.queue_ms / 1e3)
            self.load.observe(choice.timings.load_ms / 1e3)
            self.prefill.observe(choice.timings.prefill_ms / 1e3)
        self.answers.observe(len(choice.token_ids))
        if len(choice.token_ids) > 1 and choice.first_token_s is not None and choice.last_token_s is not None:
            self.tpot.observe((choice.last_token_s - choice.first_token_s) / (len(choice.token_ids) - 1))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, buckets=buckets, registry=self._registry)


class RedisCollector(Collector):
    """The Redis that keeps responses, as its breaker knows it."""

    def __init__(self, store: "RedisStore") -> None:
        self._store = store

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        states = dict.fromkeys(("closed", "half_open", "open"), 0.0) | {self._store.state: 1.0}
        help_text = "1 for the state of the breaker in front of Redis; closed: it is asked."
        yield _labelled(GaugeMetricFamily("reprise_redis_breaker", help_text, labels=["state"]), states)
        yield CounterMetricFamily("reprise_redis_failures", "Calls that Redis failed.", self._store.failures)


class EngineCollector(Collector):
    """The engine's last heartbeat. Its totals begin anew with every engine process, as Prometheus counters may."""

    def __init__(self, *, engine: "EnginePort") -> None:
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
            (
                "prompt_tokens",
                "Prompt tokens by where their KV was.",
                "outcome",
                _from_zero((*CACHED, "computed"), stats.prompt_tokens),
            ),
            ("miss_tokens", "Computed prompt tokens by reason.", "reason", _from_zero(MISS_REASONS, stats.miss_tokens)),
            ("moved_bytes", "KV moved between tiers.", "direction", _from_zero(DIRECTIONS, stats.moved_bytes)),
            (
                "moved_seconds",
                "Time of the threads that moved it.",
                "direction",
                _from_zero(DIRECTIONS, stats.moved_seconds),
            ),
            (
                "tier_evictions",
                "Blocks that left a tier to make room.",
                "tier",
                _from_zero(("hbm", *LOWER_TIERS), stats.evictions),
            ),
            ("refused_blocks", "Blocks that a tier had no room for.", "tier", _from_zero(LOWER_TIERS, stats.refused)),
            (
                "tier_write_failures",
                "Writes that a tier refused or failed in.",
                "tier",
                _from_zero(LOWER_TIERS, stats.write_failures),
            ),
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
    cost = {term: seconds for term, seconds in state.step_cost.items() if term != "margin"}
    help_text = "What a step costs: fixed, per token, per thousand pairs, per row, per thousand tokens it reads."
    yield _labelled(GaugeMetricFamily("reprise_step_cost_seconds", help_text, labels=["term"]), cost)
    yield CounterMetricFamily(
        "reprise_overtakes", "Starts before one that entered the window earlier.", state.overtakes
    )
    help_text = "Preemptions for a tenant who had nothing running."
    yield CounterMetricFamily("reprise_fair_preemptions", help_text, state.fair_preemptions)
    timer = CounterMetricFamily("reprise_prefetch_timer", "Loads started ahead, by how it came.", labels=["outcome"])
    yield _labelled(timer, state.timer)
    loads = CounterMetricFamily("reprise_started_loads", "Loads at the start of their request.", labels=["outcome"])
    yield _labelled(loads, state.loads)


def _from_zero(names: Iterable[str], values: Mapping[str, float]) -> dict[str, float]:
    return {**dict.fromkeys(names, 0.0), **values}


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family
