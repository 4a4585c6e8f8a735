"""Tests that dashboards and alert rules name what servers, gateways and Prometheus report."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from reprise.fleet.gateway.metrics import Metrics as GatewayMetrics
from tests.app.api.reprise.test_events import queue, waiting
from tests.app.fakes import STATS, FakeEngine, in_process, make_settings, write_tokenizer
from tests.docker.queries import ALERTS, ALERTS_TEST, DOCKER, FLEET, SERVER, alerts, labels_in, names_in, panels, shown
from tests.redis_servers import RedisServer, redis_server

# What redis_exporter and Prometheus itself report; `make test-compose` sees that they do.
OF_OTHERS = {
    "up": {"job", "instance"},
    "redis_memory_used_bytes": {"redis"},
    "redis_memory_max_bytes": {"redis"},
    "redis_commands_processed_total": {"redis"},
    "redis_evicted_keys_total": {"redis"},
}
OF_TARGETS = {"job", "instance", "replica"}  # labels that Prometheus adds


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


@pytest.fixture
async def reported(redis: RedisServer, tmp_path: Path) -> dict[str, set[str]]:
    """Metric -> its labels, of a replica that has answered and of a gateway."""
    engine = FakeEngine(directory=write_tokenizer(tmp_path))
    state = msgspec.structs.replace(queue(waiting("r/0", "t")), loads={"hidden": 2})
    engine.stats = msgspec.structs.replace(STATS, scheduler=state)
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    fleet = {"fleet": {"redis_url": redis.url}, "server": {"tenant_secret_file": str(secret)}}
    async with in_process(engine, make_settings(tmp_path, **fleet)) as running:
        await running.app.state.hooks.beat()
        await running.chat()
        engine.script.refuse = "internal_error"
        await running.chat()
        replica = (await running.http.get("/metrics")).text
    gateway = GatewayMetrics()
    gateway.follow(
        breaker=lambda: "closed", redis_failures=lambda: 0, held_bytes=lambda: 0, replicas=lambda: {"ready": 1}
    )
    gateway.requests.labels("/ready", "200").inc()
    labels: dict[str, set[str]] = dict(OF_OTHERS)
    for text in (replica, gateway.render().decode()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels, OF_TARGETS)
    return labels


@pytest.mark.parametrize("expressions", [shown(SERVER), shown(FLEET), alerts()], ids=["server", "fleet", "alerts"])
async def test_every_query_names_what_is_reported(
    expressions: list[tuple[str, str]], reported: dict[str, set[str]]
) -> None:
    assert len(expressions) >= 10
    for title, expression in expressions:
        names = names_in(expression)
        assert names, title
        assert names <= reported.keys(), (title, names - reported.keys())
        known = set().union(*(reported[name] for name in names))
        assert labels_in(expression) <= known, (title, labels_in(expression) - known)
        assert expression.count("(") == expression.count(")"), title


def test_what_the_dashboards_show_is_everything_that_may_be_a_fault() -> None:
    server = " ".join(expression for _, expression in shown(SERVER))
    for name in ("verify_mismatches", "load_failures", "tier_write_failures", "engine_restarts", "failed_generations"):
        assert f"reprise_{name}_total" in server
    of_gateway = {name for _, expression in shown(FLEET) for name in names_in(expression)}
    gateway = GatewayMetrics()
    gateway.follow(breaker=lambda: "closed", redis_failures=lambda: 0, held_bytes=lambda: 0, replicas=dict)
    told = {
        family.name
        for family in text_string_to_metric_families(gateway.render().decode())
        if not re.match("reprise_(process|build)|.*_created$", family.name)
    }
    assert told == {re.sub("_(total|bucket)$", "", name) for name in of_gateway} & told


def test_there_is_an_alert_for_what_should_wake_somebody_up() -> None:
    assert {name for name, _ in alerts()} >= {
        *("ReplicaGone", "NoReplica", "BreakerOpen", "DirectoryFull", "NoUploads", "OutboxGrows", "WaitsOverTarget"),
        *("EngineDown", "AnswersLost", "WrongKv", "ServerGone", "DiskAway"),
    }
    config = yaml.safe_load((DOCKER / "prometheus.yaml").read_text(encoding="utf-8"))
    assert config["rule_files"] == [ALERTS.name]
    (job,) = config["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}} == 0' in dict(alerts())["ServerGone"]
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]


def test_promtool_accepts_the_rules_and_what_is_scraped() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for words in (
        ("check", "rules", ALERTS),
        ("check", "config", "--syntax-only", DOCKER / "prometheus" / "fleet.yaml"),
        ("test", "rules", ALERTS_TEST),
    ):
        done = subprocess.run([promtool, *map(str, words)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_in_its_unit_tests() -> None:
    tests = yaml.safe_load(ALERTS_TEST.read_text(encoding="utf-8"))["tests"]
    (failing,) = (one for one in tests if one["name"] == "everything fails at once")
    (query,) = failing["promql_expr_test"]
    fired = {re.findall('"(.*)"', sample["labels"])[0] for sample in query["exp_samples"]}
    assert fired == {name for name, _ in alerts()}


@pytest.mark.parametrize("dashboard", [SERVER, FLEET], ids=["server", "fleet"])
def test_panels_have_places_of_their_own(dashboard: Path) -> None:
    taken = set()
    for panel in panels(dashboard):
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels(dashboard)}) == len(panels(dashboard))


def test_grafana_finds_the_dashboards_and_their_source() -> None:
    compose = yaml.safe_load((DOCKER / "compose.fleet.yaml").read_text(encoding="utf-8"))
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/reprise.yaml").read_text())["providers"]
    shown_from = {target for source, target in mounts.items() if source.endswith(".json")}
    assert shown_from == {f"{provider['options']['path']}/{dashboard.name}" for dashboard in (SERVER, FLEET)}
    assert compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in shown_from
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
