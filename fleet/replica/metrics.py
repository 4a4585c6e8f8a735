"""Reports metrics of a replica's use of the directory, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reprise.fleet.records import Outcome
from reprise.fleet.replica.replica import Replica

CLAIMS = ("new", "home", "adopted", "failed")
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
COMMITS = (*Outcome, "unsent", "full")


class ReplicaCollector(Collector):
    """A collector of the counts of one replica, for Prometheus."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        text = "One question to the fleet's Redis, answered or not."
        self._asked = Histogram("reprise_directory_seconds", text, buckets=SECONDS, registry=None)
        replica.directory.on_answer(self._asked.observe)

    def collect(self) -> Iterator[Metric]:
        replica = self._replica
        help_text = "Sessions claimed before a turn: new, at home here, adopted from another replica, or failed."
        claims = CounterMetricFamily("reprise_fleet_claims", help_text, labels=["result"])
        for result in CLAIMS:
            claims.add_metric([result], replica.claims[result])
        yield claims
        help_text = "Commits by outcome; unsent: the directory does not answer; full: it has no memory left."
        commits = CounterMetricFamily("reprise_fleet_commits", help_text, labels=["outcome"])
        for outcome in COMMITS:
            commits.add_metric([outcome], replica.commits[outcome])
        yield commits
        yield GaugeMetricFamily(
            "reprise_fleet_outbox_sessions", "Sessions that wait to be committed.", replica.outbox.waiting
        )
        yield from self._asked.collect()
