"""Defines the metrics of a gateway, in a registry of their own."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reprise.app.conversations.breaker import State
from reprise.app.version import version
from reprise.fleet.gateway.finder import Route

ROUTES = ("home", "new", "moved", "adopted", "fallback")
REASONS = ("wait", "dead", "drain", "refused", "asked")
REFUSALS = ("guard", "budget")
Limit = Literal["requests", "tokens", "places"]
LIMITS = get_args(Limit)
ADDED_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Resumed(StrEnum):
    """The outcome of an answer whose replica failed after it had begun to reach the client."""

    DONE = "done"  # another replica went on
    LOST = "lost"  # nobody could


class Metrics:
    """The metrics of one gateway. Used on its event loop only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "reprise_requests", "HTTP requests by path and status; 499 is a client that left.", "route", "status"
        )
        self._routes = self._counter("reprise_gateway_requests", "Turns by the route of their first try.", "route")
        self._moves = self._counter("reprise_gateway_moves", "Turns sent away from their session's home.", "why")
        self._refused = self._counter(
            "reprise_gateway_moves_refused", "Turns left at home although another replica would be earlier.", "why"
        )
        self._failures = self._counter(
            "reprise_gateway_replica_failures", "Tries that a replica failed, before or after the first byte.", "when"
        )
        self._limited = self._counter(
            "reprise_gateway_limited", "Requests refused because their key has used up a limit in the fleet.", "limit"
        )
        self._resumes = self._counter("reprise_gateway_resumes", "Streams whose replica failed.", "outcome")
        self._pause = self._histogram(
            "reprise_gateway_resume_pause_seconds", "Failure of a stream's replica to the next token.", SECONDS
        )
        self._found = self._histogram(
            "reprise_gateway_added_seconds", "Arrival of a turn's headers until it is sent to a replica.", ADDED_SECONDS
        )
        self._asked = self._histogram(
            "reprise_directory_seconds", "One question to the fleet's Redis, answered or not.", ADDED_SECONDS
        )
        self._first = self._histogram(
            "reprise_gateway_first_byte_seconds", "Arrival of a turn to the first byte of its answer.", SECONDS
        )
        for counter, labels in (
            (self._routes, ROUTES),
            (self._moves, REASONS),
            (self._refused, REFUSALS),
            (self._failures, ("before", "after")),
            (self._limited, LIMITS),
            (self._resumes, tuple(Resumed)),
        ):
            for label in labels:
                counter.labels(label)
        Info("reprise_build", "What runs.", registry=self._registry).info({"version": version()})
        ProcessCollector("reprise", registry=self._registry)

    def routed(self, route: Route, *, again: bool) -> None:
        """Count the route that was chosen for a turn. again: whether the turn was tried before; then nothing is
        counted, because a turn counts once."""
        if again:
            return
        self._routes.labels(route.route).inc()
        if route.refused:
            self._refused.labels(route.refused).inc()

    def moved(self, why: str) -> None:
        """Count a turn that was sent to another replica than its session's home. why: the reason, one of `REASONS`."""
        self._moves.labels(why).inc()

    def found(self, seconds: float) -> None:
        self._found.observe(seconds)

    def limited(self, limit: Limit) -> None:
        self._limited.labels(limit).inc()

    def asked(self, seconds: float) -> None:
        self._asked.observe(seconds)

    def began(self, seconds: float) -> None:
        self._first.observe(seconds)

    def failed(self, *, began: bool) -> None:
        self._failures.labels("after" if began else "before").inc()

    def resumed(self, outcome: Resumed, pause_s: float) -> None:
        self._resumes.labels(outcome).inc()
        if outcome is Resumed.DONE:
            self._pause.observe(pause_s)

    def follow(
        self,
        *,
        breaker: Callable[[], State],
        redis_failures: Callable[[], int],
        held_bytes: Callable[[], int],
        replicas: Callable[[], dict[str, int]],
    ) -> None:
        """Report, too, what these functions return whenever the metrics are read: the state of the connection to Redis
        and its failed calls, the bytes kept for requests under way, and the number of replicas in each state."""
        held = Gauge("reprise_gateway_held_bytes", "Kept for requests under way.", registry=self._registry)
        held.set_function(held_bytes)
        self._registry.register(_Fleet(breaker, redis_failures, replicas))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the outcomes of turns since the start: name of a counter -> label -> value."""
        counters = {
            "routes": self._routes,
            "moves": self._moves,
            "moves_refused": self._refused,
            "failures": self._failures,
            "resumes": self._resumes,
        }
        return {name: _by_label(counter) for name, counter in counters.items()}

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


def _by_label(counter: Counter) -> dict[str, int]:
    """Return the values of a counter with one label."""
    samples = [sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")]
    return {label: int(sample.value) for sample in samples for label in sample.labels.values()}


class _Fleet(Collector):
    """A collector of the state of the directory and the replicas, taken when the metrics are read."""

    def __init__(
        self, breaker: Callable[[], State], redis_failures: Callable[[], int], replicas: Callable[[], dict[str, int]]
    ) -> None:
        self._breaker = breaker
        self._redis_failures = redis_failures
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        states = dict.fromkeys(("closed", "half_open", "open"), 0.0) | {self._breaker(): 1.0}
        text = "1 for the state of the breaker in front of the fleet's Redis; closed: it is asked."
        breaker = GaugeMetricFamily("reprise_redis_breaker", text, labels=["state"])
        for state, value in states.items():
            breaker.add_metric([state], value)
        yield breaker
        yield CounterMetricFamily("reprise_redis_failures", "Calls that Redis failed.", self._redis_failures())
        replicas = GaugeMetricFamily(
            "reprise_fleet_replicas", "Replicas by what they say of themselves.", labels=["state"]
        )
        for state, count in sorted(self._replicas().items()):
            replicas.add_metric([state], count)
        yield replicas
