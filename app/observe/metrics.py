"""Prometheus metrics in a registry of their own: what the app measures, and what the engine reports about itself.

Labels whose values are known are there from the start, at zero: a rate over a counter that has just appeared misses its
first increase.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from reprise.app.conversations.redis_store import RedisStore
from reprise.app.errors import ApiError
from reprise.app.observe.engine_metrics import EngineCollector, _labelled
from reprise.app.state_disk import StateDisk
from reprise.app.turn.answer import Answer
from reprise.app.turn.kv_sources import CACHED, SOURCES, tokens_by_source
from reprise.app.turn.observer import ObservedTurn, TurnObserver
from reprise.app.turn.ports import EnginePort
from reprise.app.version import version

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
HISTORY_OUTCOMES = (*SOURCES, "truncated", "shifted")


class Metrics(TurnObserver):
    """The metrics of one app. Used on the event loop only."""

    def __init__(self, *, engine: EnginePort, active: Callable[[], int]) -> None:
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
        self.targets = Counter(
            "reprise_ttft_target_turns",
            "Turns with a target for their first token, by whether that came in time. A turn that is refused or left "
            "before its target has passed counts as neither.",
            ("outcome",),
            registry=self._registry,
        )
        self.saved = Counter(
            "reprise_saved_seconds",
            "About how much sooner first tokens came because KV was reused, by the engine's measured rates.",
            registry=self._registry,
        )
        for outcome in ("made", "missed"):
            self.targets.labels(outcome)
        for source in SOURCES:
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

    def add(self, collector: Collector) -> None:
        """Register a collector. `render` then includes its metrics."""
        self._registry.register(collector)

    def request_done(self, scope: Scope, status: int) -> None:
        """Count a request by its route and status. Not by its path: a scanner would fill the metrics with labels."""
        self.requests.labels(getattr(scope.get("route"), "path", "unknown"), str(status)).inc()

    def first_token(self, turn: ObservedTurn, answer: Answer) -> None:
        """Observe the time to an answer's first token, and count where its prompt's KV came from."""
        assert answer.first_token_s is not None
        ttft_s = answer.first_token_s - turn.arrived_s
        self.ttft.observe(ttft_s)
        if answer is turn.choices[0] and turn.made_target is not None:
            self.targets.labels("made" if turn.made_target else "missed").inc()
        if answer is turn.choices[0] and answer.timings is not None and not answer.is_resumed:
            self.saved.inc(max(0.0, answer.timings.saved_ms) / 1e3)
        report = answer.report
        if report is None:
            return
        found = tokens_by_source(report)
        largest = max(CACHED, key=lambda tier: found[tier])
        computed_most = report.computed_tokens > report.cached_tokens
        self.ttft_by_source.labels("computed" if computed_most else largest).observe(ttft_s)
        self.prompts.observe(report.prompt_tokens)
        outcomes = {
            **found,
            "computed": max(
                0, report.history_tokens - report.cached_tokens
            ),  # tokens of the history; new ones are not lost
            "truncated": report.truncated_tokens,
            "shifted": report.shifted_tokens,
            "coded": report.coded_tokens,
        }
        for outcome, tokens in outcomes.items():
            self.history.labels(outcome).inc(tokens)

    def gap(self, turn: ObservedTurn, seconds: float) -> None:
        self.itl.observe(seconds)

    def failed(self, turn: ObservedTurn, error: ApiError) -> None:
        self.failures.labels(error.code).inc()

    def closed(self, turn: ObservedTurn) -> None:
        seconds = time.monotonic() - turn.arrived_s
        self.e2e.observe(seconds)
        target_ms, has_begun = turn.ttft_target_ms, turn.choices[0].first_token_s is not None
        if target_ms is not None and not has_begun and seconds * 1e3 > target_ms:
            self.targets.labels("missed").inc()

    def ended(self, turn: ObservedTurn, answer: Answer) -> None:
        if answer.timings is not None:
            self.queue.observe(answer.timings.queue_ms / 1e3)
            self.load.observe(answer.timings.load_ms / 1e3)
            self.prefill.observe(answer.timings.prefill_ms / 1e3)
        self.answers.observe(len(answer.token_ids))
        if len(answer.token_ids) > 1 and answer.first_token_s is not None and answer.last_token_s is not None:
            self.tpot.observe((answer.last_token_s - answer.first_token_s) / (len(answer.token_ids) - 1))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, buckets=buckets, registry=self._registry)


class RedisCollector(Collector):
    """A collector of the state of the Redis that stores responses, as its circuit breaker knows it."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        states = dict.fromkeys(("closed", "half_open", "open"), 0.0) | {self._store.state: 1.0}
        help_text = "1 for the state of the breaker in front of Redis; closed: it is asked."
        yield _labelled(GaugeMetricFamily("reprise_redis_breaker", help_text, labels=["state"]), states)
        yield CounterMetricFamily("reprise_redis_failures", "Calls that Redis failed.", self._store.failures)


class StateDiskCollector(Collector):
    """A collector of the state of the disk with transcripts, stored responses and the outbox: whether it answers."""

    def __init__(self, disk: StateDisk) -> None:
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        help_text = (
            "1 while transcripts and stored responses can be read and kept; 0: their disk does not answer, is full, is "
            "read-only or reports errors; /health says which."
        )
        yield GaugeMetricFamily("reprise_state_disk_used", help_text, 1.0 if self._disk.state == "used" else 0.0)
        help_text = "Calls for transcripts and stored responses that their disk did not answer in time, or not made."
        yield CounterMetricFamily("reprise_state_disk_failures", help_text, self._disk.failures)
