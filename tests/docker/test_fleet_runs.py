"""Starts docker/compose.fleet.yaml with the bundled model and uses it as its users would: `make test-compose`.

Needs root, Debian's docker.io, docker-compose and mmdebstrap, and packages and wheels from their ordinary sources.
Grafana is left out, as Debian has no package of it; every expression of its dashboards is asked of the Prometheus that
runs.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml

from benchmarks.harness.servers import free_port
from tests.docker.daemon import Docker, run
from tests.docker.project import QUESTION, WAIT_S, Project, Stream, begun, wait_until
from tests.docker.queries import ALERTS_TEST, DOCKER, FLEET, SERVER, alerts, shown

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = DOCKER.parent
PROJECT = "reprise-test"
RAY_FILE = "compose.ray.yaml"
REPLICAS, GATEWAYS = 2, 2
# One thread: two replicas share a small machine. float32: an answer is the same after a resume.
SMALL = {
    "REPRISE_MODEL__SOURCE": "bundled",
    "REPRISE_MODEL__DTYPE": "float32",
    "REPRISE_ENGINE__THREADS": "1",
    "REPRISE_CACHE__DRAM_GIB": "0.05",
    "REPRISE_CACHE__DISK_GIB": "0.2",
    "REPRISE_CACHE__REDIS_GIB": "0.2",
    "REPRISE_KV_MAXMEMORY": "300mb",
    "REPRISE_FLEET__DEADLINE_MS": "2000",
    "LOAD_ARGS": "--conversations 6 --rate 2 --think fixed:0.5 --scale 0.1 --max-context 600 --answer-tokens 20",
}
# What is there only after something that does not happen here: failures.
ONLY_AFTERWARDS = ("reprise_load_failures_total", "reprise_failed_generations_total")


@dataclass
class Fleet(Project):
    """The containers of compose.fleet.yaml."""

    ready_after_s: float = 0.0

    def secret(self, name: str) -> str:
        return self.docker("exec", self.containers("gateway")[0], "cat", f"/run/fleet/{name}").strip()

    def wait_for_replicas(self, count: int) -> None:
        def is_so() -> bool:
            try:
                return self.ask("/health").json().get("replicas") == count
            except (httpx.HTTPError, ValueError):
                return False

        wait_until(is_so, f"{count} replicas")

    def prometheus(self, path: str) -> Any:
        """Ask its API."""
        (container,) = self.containers("prometheus")
        answer = json.loads(self.docker("exec", container, "wget", "-qO-", f"http://127.0.0.1:9090/api/v1/{path}"))
        assert answer["status"] == "success"
        return answer["data"]

    def value(self, expression: str) -> float:
        """Return the one value of an expression; 0 without any."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else 0.0

    def query(self, expression: str) -> list[dict[str, Any]]:
        whole = expression.replace("$__rate_interval", "2m")
        result: list[dict[str, Any]] = self.prometheus(f"query?query={quote(whole)}")["result"]
        return result

    def without_result(self, expressions: Sequence[str]) -> set[str]:
        """Return those that Prometheus has nothing for."""
        (container,) = self.containers("prometheus")
        ask = 'for query; do wget -qO- "http://127.0.0.1:9090/api/v1/query?query=$query"; echo; done'
        words = [quote(expression.replace("$__rate_interval", "2m")) for expression in expressions]
        answers = self.docker("exec", container, "sh", "-c", ask, "sh", *words).splitlines()
        found = zip(expressions, answers, strict=True)
        return {expression for expression, answer in found if not json.loads(answer)["data"]["result"]}


@pytest.fixture(scope="module")
def fleet(docker: Docker, tree: Path) -> Iterator[Fleet]:
    port = free_port()
    environ = {
        **docker.environ, **SMALL, "REPRISE_LISTEN": f"127.0.0.1:{port}", "REPRISE_DIRECTORY_MAXMEMORY": "100mb",
        "COMPOSE_HTTP_TIMEOUT": str(int(WAIT_S)),
    }  # fmt: skip
    fleet = Fleet(docker, PROJECT, for_docker_compose_1(tree / "docker"), environ, f"http://127.0.0.1:{port}")
    try:
        began_s = time.monotonic()
        fleet.compose("up", "--detach", "--scale", f"replica={REPLICAS}")
        fleet.key = fleet.secret("client_key")
        fleet.wait_for_replicas(REPLICAS)
        fleet.ready_after_s = time.monotonic() - began_s
        print(f"ready after {fleet.ready_after_s:.0f} s", file=sys.__stderr__)
        yield fleet
    finally:
        print(fleet.compose("logs", "--tail", "40", "--no-color", check=False)[-20_000:])
        fleet.compose("down", "--volumes", "--remove-orphans", check=False)


def for_docker_compose_1(directory: Path) -> Path:
    """Write the compose file so that Debian's version of compose reads it, without the image that is not to be had."""
    compose = yaml.safe_load((directory / "compose.fleet.yaml").read_text(encoding="utf-8"))
    del compose["name"], compose["services"]["grafana"], compose["volumes"]["grafana"]
    del compose["services"]["secrets"]["build"]  # it is built already
    ray = yaml.safe_load((directory / RAY_FILE).read_text(encoding="utf-8"))
    del ray["services"]["secrets"]
    (directory / RAY_FILE).write_text(yaml.safe_dump(ray, sort_keys=False), encoding="utf-8")
    path = directory / "compose.test.yaml"
    path.write_text(yaml.safe_dump(compose, sort_keys=False), encoding="utf-8")
    return path


# --- a chat -----------------------------------------------------------------------------------------------------------


def test_a_chat_through_the_published_port(fleet: Fleet) -> None:
    body = {"model": "bundled", "messages": [QUESTION], "max_tokens": 8}
    answer = fleet.ask("/v1/chat/completions", method="POST", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert fleet.ask("/v1/chat/completions", method="POST", json=body, key="").status_code == 401
    assert fleet.ask("/v1/models").json()["data"][0]["id"] == "bundled"
    assert fleet.ask("/v1/fleet").status_code == 403  # the client's key is no admin's


def test_gateways_share_the_clients(fleet: Fleet) -> None:
    assert len(fleet.containers("gateway")) == GATEWAYS
    wait_until(
        lambda: fleet.value('sum(haproxy_server_status{proxy="gateways", state="UP"})') == GATEWAYS, "both gateways"
    )


def test_no_container_can_do_more_than_it_must(fleet: Fleet) -> None:
    containers = fleet.containers()
    assert len(containers) == REPLICAS + GATEWAYS + len(("haproxy", "directory", "kv", "prometheus", "redis-exporter"))
    for container in containers:
        told = fleet.docker.inspect(container)
        name = told["Config"]["Labels"]["com.docker.compose.service"]
        assert told["HostConfig"]["ReadonlyRootfs"], name
        assert not told["HostConfig"]["Privileged"], name
        published = {bound["HostIp"] for ports in told["NetworkSettings"]["Ports"].values() for bound in ports or ()}
        assert published == ({"127.0.0.1"} if name == "haproxy" else set()), name
        # Even root in there has no capability, gains none, and cannot write.
        status = fleet.docker("exec", "--user", "0", container, "cat", "/proc/self/status", "/proc/1/status")
        found = [line.split() for line in status.splitlines()]
        assert {words[1] for words in found if words and words[0] in ("CapEff:", "CapPrm:", "CapBnd:")} == {"0" * 16}, (
            name
        )
        assert {words[1] for words in found if words and words[0] == "NoNewPrivs:"} == {"1"}, name
        wrote = fleet.docker(
            "exec", "--user", "0", container, "sh", "-c", "touch /probe 2>/dev/null && echo yes", check=False
        )
        assert wrote == "", name
        uid = fleet.docker("exec", container, "id", "-u").strip()
        assert uid != "0", name


def test_a_gateway_cannot_reach_the_kv(fleet: Fleet) -> None:
    code = (
        "import socket, sys\ntry: socket.create_connection((sys.argv[1], 6379), 2); print('yes')\nexcept OSError: pass"
    )
    for service, host, expected in (("gateway", "kv", ""), ("gateway", "directory", "yes"), ("replica", "kv", "yes")):
        container = fleet.containers(service)[0]
        assert fleet.docker("exec", container, "python", "-c", code, host).strip() == expected, (service, host)


def test_a_replica_that_is_killed_in_a_stream_is_not_noticed(fleet: Fleet) -> None:
    expected = begun(Stream(fleet)).whole()
    resumed = 'sum(reprise_gateway_resumes_total{outcome="done"})'
    before = fleet.value(resumed)
    container_of = {_name_of(fleet, one): one for one in fleet.containers("replica")}
    for _ in range(3):  # on a fast machine the answer may be over before docker has killed anybody
        stream = begun(Stream(fleet))
        wait_until(lambda stream=stream: len(stream.pieces) > 3 or not stream.is_alive(), "the first tokens")
        victim = container_of[stream.served_by]
        fleet.docker("kill", victim)
        assert stream.whole() == expected
        fleet.docker("start", victim)
        fleet.wait_for_replicas(REPLICAS)
        time.sleep(10)  # Prometheus looks every five seconds
        if fleet.value(resumed) > before:
            break
    else:
        pytest.fail("no answer was resumed: none was running when its replica was killed")


def _name_of(fleet: Fleet, replica: str) -> str:
    return fleet.docker("exec", replica, "cat", "/var/lib/reprise/replica").strip()


def test_a_conversation_goes_on_at_the_other_replica_with_its_kv(fleet: Fleet) -> None:
    admin = fleet.secret("prometheus_key")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "The lamp turned slowly over the dark water. " * 20}]

    def turn() -> tuple[str, int]:
        body = {"model": "bundled", "messages": messages, "max_tokens": 16, "session_id": "a-chat", "temperature": 0}
        answer = fleet.ask("/v1/chat/completions", method="POST", json=body, key=admin)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": "And then?"})
        home = answer.headers["x-route"].split(";")[0].removeprefix("replica=")
        return home, answer.json()["x_cache"]["redis_tokens"]

    home, _ = turn()
    replicas = {one["replica"] for one in fleet.ask("/v1/fleet", key=admin).json()["replicas"]}
    for _ in range(10):  # what a turn leaves is uploaded after it
        time.sleep(3)
        (other,) = replicas - {home}
        moved = fleet.ask("/v1/fleet/move", method="POST", json={"session_id": "a-chat", "replica": other}, key=admin)
        assert moved.status_code == 200, moved.text
        home, from_redis = turn()
        assert home == other
        if from_redis:
            return
    pytest.fail("no turn found its KV in Redis")


def test_the_load_generator_leaves_its_report(fleet: Fleet, tmp_path: Path) -> None:
    fleet.compose("--profile", "loadgen", "run", "-T", "--no-deps", "--name", f"{PROJECT}-load", "loadgen")
    fleet.docker("cp", f"{PROJECT}-load:/reports/load.html", str(tmp_path / "load.html"))
    assert "<html" in (tmp_path / "load.html").read_text(encoding="utf-8")


# --- what is watched --------------------------------------------------------------------------------------------------


def test_promtool_accepts_the_files(fleet: Fleet) -> None:
    (container,) = fleet.containers("prometheus")
    # It looks for the key's file too, and for the rules.
    fleet.docker("exec", container, "promtool", "check", "config", "/etc/prometheus/prometheus.yaml")
    places = (DOCKER / "prometheus", ALERTS_TEST)
    mounts = [word for place in places for word in ("--volume", f"{place}:/w/{place.relative_to(ROOT)}:ro")]
    promtool = ("--entrypoint", "promtool", "prom/prometheus:v3.5.0", "test", "rules")
    fleet.docker("run", "--rm", *mounts, *promtool, f"/w/{ALERTS_TEST.relative_to(ROOT)}")
    rules = {rule["name"] for group in fleet.prometheus("rules")["groups"] for rule in group["rules"]}
    assert rules == {name for name, _ in alerts()}


def test_every_target_is_up(fleet: Fleet) -> None:
    def up() -> dict[str, int]:
        counts: dict[str, int] = {}
        for target in fleet.prometheus("targets?state=active")["activeTargets"]:
            if target["health"] == "up":
                counts[target["labels"]["job"]] = counts.get(target["labels"]["job"], 0) + 1
        return counts

    expected = {"replica": REPLICAS, "gateway": GATEWAYS, "haproxy": 1, "redis": 2, "prometheus": 1}
    wait_until(lambda: up() == expected, f"all targets of {expected}", 180)


def test_no_alert_is_raised_by_a_fleet_at_work(fleet: Fleet) -> None:
    def firing() -> set[str]:
        return {one["labels"]["alertname"] for one in fleet.prometheus("alerts")["alerts"] if one["state"] == "firing"}

    # A busy machine may keep turns waiting. A replica that was killed a moment ago may still be missed.
    wait_until(lambda: firing() <= {"WaitsOverTarget"}, "the end of every alert", 180)


def test_every_panel_has_something_to_show(fleet: Fleet) -> None:
    begun(Stream(fleet, max_tokens=20)).whole()
    expressions = {
        expression
        for dashboard in (SERVER, FLEET)
        for _, expression in shown(dashboard)
        if not any(name in expression for name in ONLY_AFTERWARDS)
    }
    # A rate needs two looks.
    wait_until(lambda: not fleet.without_result(sorted(expressions)), "every panel", 180)


def test_without_a_gateway_clients_hear_an_error_of_the_usual_form(fleet: Fleet) -> None:
    gateways = fleet.containers("gateway")
    fleet.docker("kill", *gateways)
    try:
        wait_until(lambda: fleet.ask("/v1/models").status_code == 503, "haproxy to see it")
        answer = fleet.ask("/v1/models")
        assert answer.json()["error"]["code"] == "no_gateway"
        assert answer.headers["retry-after"].isdecimal()
    finally:
        fleet.docker("start", *gateways)
        fleet.wait_for_replicas(REPLICAS)


# --- with Ray ---------------------------------------------------------------------------------------------------------


def test_ray_replaces_nodes_and_goes_on_behind_another_head(fleet: Fleet) -> None:
    """A node is killed in the middle of an answer, then the head. Comes last, as the replicas without Ray end."""
    expected = begun(Stream(fleet)).whole()
    fleet.docker("stop", *fleet.containers("replica"))
    overlay = ("--file", str(fleet.file.with_name(RAY_FILE)))
    began_s = time.monotonic()
    fleet.compose(*overlay, "up", "--detach", "--no-deps", "head")
    fleet.compose(*overlay, "up", "--detach", "--no-deps", "--scale", f"node={REPLICAS}", "node")
    try:
        fleet.wait_for_replicas(REPLICAS)
        print(f"with Ray: ready after {time.monotonic() - began_s:.0f} s", file=sys.__stderr__)
        node_of = {_address_of(fleet, node): node for node in fleet.containers("node")}
        stream = begun(Stream(fleet))
        wait_until(lambda: len(stream.pieces) > 3 or not stream.is_alive(), "the first tokens")
        replicas = fleet.ask("/v1/fleet", key=fleet.secret("prometheus_key")).json()["replicas"]
        (url,) = {one["url"] for one in replicas if one["replica"] == stream.served_by}
        victim = node_of[url.removeprefix("http://").partition(":")[0]]
        fleet.docker("kill", victim)
        assert stream.whole() == expected
        fleet.docker("start", victim)
        began_s = time.monotonic()
        wait_until(lambda: all(_servers(fleet).values()), "a server on each node")  # the last beat of the other counts
        fleet.wait_for_replicas(REPLICAS)
        print(f"with Ray: a node replaced after {time.monotonic() - began_s:.0f} s", file=sys.__stderr__)

        (head,) = fleet.containers("head")
        before = _servers(fleet)
        fleet.docker("kill", head)
        assert begun(Stream(fleet)).whole() == expected
        fleet.docker("start", head)
        wait_until(lambda: fleet.docker.inspect(head)["State"]["Health"]["Status"] == "healthy", "another head")
        assert begun(Stream(fleet)).whole() == expected
        assert _servers(fleet) == before  # the same ones go on
    finally:
        print(fleet.compose(*overlay, "logs", "--tail", "40", "--no-color", "head", "node", check=False)[-20_000:])
        fleet.compose(*overlay, "rm", "--force", "--stop", "-v", "head", "node", check=False)


def _address_of(fleet: Fleet, container: str) -> str:
    networks = fleet.docker.inspect(container)["NetworkSettings"]["Networks"]
    return str(networks[f"{PROJECT}_members"]["IPAddress"])


def _servers(fleet: Fleet) -> dict[str, list[str]]:
    """Return the processes that serve, by node: their ids and the times of their starts."""
    code = (
        "import json, pathlib; print(json.dumps(["
        "p.parent.name + ' ' + (p.parent / 'stat').read_text().rsplit(')')[1].split()[19] for p in "
        "pathlib.Path('/proc').glob('[0-9]*/cmdline') if b'\\0--fleet.advertise\\0' in p.read_bytes()]))"
    )
    return {node: json.loads(fleet.docker("exec", node, "python", "-c", code)) for node in fleet.containers("node")}


# --- the files alone --------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which(str(Path(sys.executable).with_name("hadolint")))
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    run(hadolint, str(DOCKER / "Dockerfile"))
