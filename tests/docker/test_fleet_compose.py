"""Tests that compose.fleet.yaml agrees with the program and keeps its promises. `make test-compose` starts it."""

import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from reprise.app.settings.sources import load_settings
from reprise.fleet.secrets import RAY_PASSWORD, RAY_TOKEN, make_secrets
from tests.docker.test_one_server import DOCKER, by_default, image_environment

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.fleet.yaml").read_text(encoding="utf-8"))[
    "services"
]
RAY: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.ray.yaml").read_text(encoding="utf-8"))["services"]
RAYS = {name: RAY[name] for name in ("head", "node")}
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "reprise"}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return target -> source; empty: a volume of this container's own."""
    found = {}
    for volume in service.get("volumes", ()):
        source, _, rest = by_default(volume).partition(":")
        found[rest.partition(":")[0] or source] = source if rest else ""
    return found


def option(service: str, name: str) -> str:
    command = SERVICES[service]["command"]
    return str(command[command.index(f"--{name}") + 1])


def test_it_is_a_whole_fleet() -> None:
    assert SERVICES["gateway"]["scale"] == 2
    assert SERVICES["replica"]["scale"] >= 2
    assert {"haproxy", "directory", "kv", "prometheus", "grafana", "redis-exporter"} < SERVICES.keys()
    assert [name for name, service in SERVICES.items() if service.get("profiles")] == ["loadgen"]
    # One builds the image, all others use it.
    assert [name for name, service in OURS.items() if "build" in service] == ["secrets"]


@pytest.mark.parametrize("name", [*SERVICES, *RAYS])
def test_every_service_is_hardened(name: str) -> None:
    service = (SERVICES | RAYS)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["pids_limit"] > 0
    assert "cap_add" not in service
    assert "privileged" not in service
    runs_once = service["restart"] == "no"
    assert (
        service["healthcheck"] == {"disable": True}
        if runs_once
        else service.get("healthcheck", {}) != {"disable": True}
    )
    assert runs_once or "mem_limit" in service
    assert not re.search(r":(latest|main|master)$", service["image"])


def test_only_haproxy_is_published_besides_grafana_and_both_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "haproxy": ["${REPRISE_LISTEN:-127.0.0.1:8000}:8000"],
        "grafana": ["${REPRISE_GRAFANA_LISTEN:-127.0.0.1:3000}:3000"],
    }


def test_who_reaches_whom() -> None:
    on = {
        network: {name for name, service in SERVICES.items() if network in service.get("networks", ())}
        for network in ("clients", "members", "directory", "kv")
    }
    assert on["directory"] == {"gateway", "replica", "directory", "redis-exporter"}
    assert on["kv"] == {"replica", "kv", "redis-exporter"}  # the gateway has no business there
    assert on["clients"] == {"haproxy", "grafana"}
    assert "network_mode" in SERVICES["secrets"]


@pytest.mark.parametrize(("service", "file"), [("gateway", "gateway.toml"), ("replica", "replica.toml")])
def test_members_load_their_settings_from_files_and_the_environment(service: str, file: str, tmp_path: Path) -> None:
    make_secrets(tmp_path, directory_host="directory:6379", kv_host="kv:6379")
    assert SERVICES[service]["command"] == ["--config", f"/run/fleet/{file}"]
    given = {
        name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", str(value))
        for name, value in SERVICES[service]["environment"].items()
        if value is not None
    }
    settings = load_settings(flags={}, environ={**image_environment(), **given}, config=tmp_path / file)
    assert settings.fleet.is_on
    assert urlsplit(settings.fleet.redis_url).hostname == "directory"
    assert settings.server.keys_file == Path("/run/fleet/keys.toml")
    assert settings.server.tenant_secret_file == Path("/run/fleet/tenant_secret")
    assert settings.fleet.advertise == ""  # the container's name, as it listens on every address
    if service == "replica":
        assert urlsplit(settings.cache.redis_url).hostname == "kv"
        # Redis must not evict before the budget is used.
        assert settings.cache.redis_gib < float(re.sub(r"^\$\{\w+:-(\d+)gb\}$", r"\1", option("kv", "maxmemory")))


def test_with_ray_nodes_stand_where_replicas_stood() -> None:
    replica, node, head = SERVICES["replica"], RAYS["node"], RAYS["head"]
    assert RAY["replica"] == {"profiles": ["without-ray"]}
    assert by_default(RAY["secrets"]["build"]["args"]["EXTRAS"]) == "redis,fleet"
    assert replica["environment"].items() <= node["environment"].items()
    assert (node["networks"], mounts(node)) == (replica["networks"], mounts(replica))
    assert set(head["networks"]) == {"members", "directory"}
    assert not {"ports"} & (node.keys() | head.keys())
    for service in (head, node):
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == f"/run/fleet/{RAY_TOKEN}"
    assert f"/run/fleet/{RAY_PASSWORD}" in head["command"][0]
    drain_s = load_settings(flags={}, environ={}, config=None).server.drain_s
    assert int(node["stop_grace_period"].rstrip("s")) > drain_s


def test_secrets_are_files_that_are_made_once_and_only_read() -> None:
    for name, service in SERVICES.items():
        found = [volume for volume in service.get("volumes", ()) if volume.startswith("secrets:")]
        expected = "secrets:/run/fleet" if name == "secrets" else "secrets:/run/fleet:ro"
        if found:
            assert found == [expected]
            if name not in ("secrets", "loadgen"):
                assert service["depends_on"]["secrets"] == {"condition": "service_completed_successfully"}
        assert not [key for key in service.get("environment", {}) if re.search("PASSWORD$|API_KEYS|REDIS_URL", key)]
    read_by_others = {name for name, service in SERVICES.items() if "/run/fleet" in mounts(service)} - OURS.keys()
    assert all(SERVICES[name]["group_add"] == ["10001"] for name in read_by_others)
    dockerfile = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert "groupadd --system --gid 10001 reprise" in dockerfile
    assert "-m 750 /run/fleet" in dockerfile


def test_the_directory_forgets_nothing_and_the_kv_whatever_it_must() -> None:
    assert option("directory", "maxmemory-policy") == "noeviction"
    assert (option("directory", "appendonly"), option("directory", "appendfsync")) == ("yes", "everysec")
    assert mounts(SERVICES["directory"])["/data"] == "directory"
    assert option("kv", "maxmemory-policy") == "allkeys-lru"
    assert (option("kv", "appendonly"), option("kv", "save")) == ("no", "")
    assert option("kv", "maxmemory-samples") == "10"
    assert option("kv", "lazyfree-lazy-eviction") == "yes"
    assert option("kv", "client-output-buffer-limit") == "normal 256mb 64mb 10"
    for name in ("directory", "kv"):
        assert option(name, "aclfile") == f"/run/fleet/{name}.acl"


def test_what_has_to_outlive_a_container_lies_on_a_volume() -> None:
    state = PurePosixPath(image_environment()["REPRISE_CACHE__DISK_DIR"])
    assert mounts(SERVICES["replica"])[str(state)] == ""  # one for each, as two servers cannot share it
    volumes = yaml.safe_load((DOCKER / "compose.fleet.yaml").read_text(encoding="utf-8"))["volumes"]
    named = {
        source for service in SERVICES.values() for source in mounts(service).values() if re.match("[a-z]", source)
    }
    assert named == volumes.keys()


def test_streams_may_end_before_a_member_is_killed() -> None:
    drain_s = load_settings(flags={}, environ={}, config=None).server.drain_s
    for name in ("gateway", "replica"):
        assert int(SERVICES[name]["stop_grace_period"].rstrip("s")) > drain_s


def test_haproxy_asks_gateways_and_breaks_no_long_answer() -> None:
    text = (DOCKER / "haproxy/haproxy.cfg").read_text(encoding="utf-8")
    limits = load_settings(flags={}, environ={}, config=None).limits
    for side in ("client", "server"):
        (seconds,) = re.findall(rf"timeout {side} (\d+)s", text)
        assert int(seconds) > limits.request_timeout_s
    (places,) = re.findall(r"server-template \w+ (\d+) gateway:8000", text)
    assert int(places) >= SERVICES["gateway"]["scale"]
    assert "retry-on conn-failure" in text  # a turn that was sent is not sent again
    assert mounts(SERVICES["haproxy"])["/usr/local/etc/haproxy/haproxy.cfg"] == "./haproxy/haproxy.cfg"


def test_prometheus_finds_every_service_that_has_metrics() -> None:
    config = yaml.safe_load((DOCKER / "prometheus/fleet.yaml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == {"replica", "gateway", "haproxy", "redis", "prometheus"}
    (discovery,) = jobs["replica"]["http_sd_configs"]
    assert discovery["url"] == "http://gateway:8000/v1/fleet/targets"
    key = discovery["authorization"]
    assert key["type"] == "Bearer"
    assert jobs["replica"]["authorization"] == jobs["gateway"]["authorization"] == key
    assert PurePosixPath(key["credentials_file"]).parent == PurePosixPath("/run/fleet")
    assert jobs["gateway"]["dns_sd_configs"][0]["names"] == ["gateway"]
    targets = {target for group in jobs["redis"]["static_configs"] for target in group["targets"]}
    assert targets == {"redis://directory:6379", "redis://kv:6379"}
    sources = mounts(SERVICES["prometheus"])
    assert all((DOCKER / source).is_file() for source in sources.values() if source.startswith("./"))
    (rules,) = config["rule_files"]
    assert sources[f"/etc/prometheus/{rules}"] == "./prometheus/alerts.yaml"


def test_the_load_generator_leaves_a_report() -> None:
    loadgen = SERVICES["loadgen"]
    words = loadgen["entrypoint"][-1]
    assert "--html /reports/load.html" in words
    assert "http://haproxy:8000" in words
    assert mounts(loadgen)["/reports"] == "reports"
