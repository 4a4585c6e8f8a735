"""Tests that the manifests are Kubernetes', hang together, and agree with the program."""

import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from reprise.app.http.middleware import OPEN_PATHS
from reprise.app.settings.sources import load_settings
from reprise.fleet.secrets import make_secrets
from tests.docker.test_fleet_compose import SERVICES
from tests.docker.test_one_server import image_environment

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for path in sorted(DIRECTORY.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
NAME = "app.kubernetes.io/name"


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    return {manifest["metadata"]["name"]: manifest for manifest in MANIFESTS if manifest["kind"] in kinds}


WORKLOADS = of_kind("Deployment", "StatefulSet")
PODS = {name: workload["spec"]["template"]["spec"] for name, workload in WORKLOADS.items()}
MEMBERS = ("gateway", "replica")


def environment(name: str) -> dict[str, str]:
    (container,) = PODS[name]["containers"]
    return {
        one["name"]: one["value"].replace("$(POD_NAME)", f"{name}-0").replace("$(POD_IP)", "10.0.0.1")
        for one in container["env"]
        if one["name"].startswith("REPRISE_")
    }


@pytest.mark.slow  # with `make test-compose`, which installs what knows the fields
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_knows_every_field(manifest: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_there_is_everything_that_a_fleet_needs() -> None:
    assert WORKLOADS.keys() == {"gateway", "replica", "directory", "kv"} == of_kind("Service").keys()
    assert of_kind("PodDisruptionBudget").keys() == set(MEMBERS)
    assert {name: workload["kind"] for name, workload in WORKLOADS.items()} == {
        "gateway": "Deployment", "replica": "StatefulSet", "directory": "StatefulSet", "kv": "Deployment",
    }  # fmt: skip
    assert WORKLOADS["gateway"]["spec"]["replicas"] == 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_selectors_and_ports_find_the_pods(name: str) -> None:
    spec = WORKLOADS[name]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    service = of_kind("Service")[name]["spec"]
    assert service["selector"].items() <= labels.items()
    (container,) = PODS[name]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in service["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    if WORKLOADS[name]["kind"] == "StatefulSet":
        assert spec["serviceName"] == name
    for budget in of_kind("PodDisruptionBudget").values():
        assert budget["spec"]["selector"]["matchLabels"][NAME] in WORKLOADS
    claimed = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())]
    volumes = {volume["name"] for volume in PODS[name].get("volumes", ())} | set(claimed)
    for one in (*PODS[name]["containers"], *PODS[name].get("initContainers", ())):
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_pod_is_hardened(name: str) -> None:
    pod = PODS[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert container["resources"]["limits"]["memory"]
    (container,) = pod["containers"]
    assert container["livenessProbe"]
    assert container["readinessProbe"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if "httpGet" in container.get(probe, {}):
            assert container[probe]["httpGet"]["path"] in OPEN_PATHS  # a probe has no key


@pytest.mark.parametrize("name", MEMBERS)
def test_members_load_their_settings(name: str, tmp_path: Path) -> None:
    make_secrets(tmp_path, directory_host="directory:6379", kv_host="kv:6379")
    (container,) = PODS[name]["containers"]
    config = PurePosixPath(container["args"][container["args"].index("--config") + 1])
    settings = load_settings(
        flags={}, environ={**image_environment(), **environment(name)}, config=tmp_path / config.name
    )
    assert urlsplit(settings.fleet.redis_url).hostname in of_kind("Service")
    (port,) = container["ports"]
    assert settings.server.port == port["containerPort"]
    assert PODS[name]["terminationGracePeriodSeconds"] > settings.server.drain_s
    mounted = [PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert PurePosixPath(str(settings.state_dir)) in mounted
    for file in (settings.server.keys_file, settings.server.tenant_secret_file):
        assert file is not None
        assert PurePosixPath(str(file)).parent in mounted
    if name == "replica":
        assert settings.fleet.advertise == "http://10.0.0.1:8000"
        assert settings.fleet.replica == "replica-0"
        assert urlsplit(settings.cache.redis_url).hostname in of_kind("Service")
        (claim,) = WORKLOADS["replica"]["spec"]["volumeClaimTemplates"]
        held = float(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
        assert float(str(settings.cache.disk_gib)) + settings.cache.disk_min_free_gib < held
        assert settings.cache.redis_gib < float(option("kv", "maxmemory").removesuffix("gb"))


def test_every_file_of_the_secret_is_one_that_the_program_makes_and_each_pod_gets_its_own(tmp_path: Path) -> None:
    make_secrets(tmp_path, directory_host="directory:6379", kv_host="kv:6379")
    made = {path.name for path in tmp_path.iterdir()}
    given = {
        name: {item["key"] for volume in pod["volumes"] for item in volume.get("secret", {}).get("items", ())}
        for name, pod in PODS.items()
    }
    assert given == {
        "gateway": {"tenant_secret", "keys.toml", "gateway.toml"},
        "replica": {"tenant_secret", "keys.toml", "replica.toml"},
        "directory": {"directory.acl"},
        "kv": {"kv.acl"},
    }
    assert set().union(*given.values()) <= made
    text = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    names = {volume["secret"]["secretName"] for pod in PODS.values() for volume in pod["volumes"] if "secret" in volume}
    assert names == {re.findall(r"create secret generic (\S+)", text)[0]}


def option(service: str, name: str) -> str:
    (container,) = PODS[service]["containers"]
    return str(container["args"][container["args"].index(f"--{name}") + 1])


def test_both_redis_servers_keep_the_promises_that_they_keep_in_containers() -> None:
    for name in ("directory", "kv"):
        here, there = PODS[name]["containers"][0]["args"], SERVICES[name]["command"]
        sizes = ("maxmemory",)
        assert [word for word in here if word not in {option(name, size) for size in sizes}] == [
            word for word in there if not word.startswith("${")
        ]
        assert PODS[name]["containers"][0]["image"] == SERVICES[name]["image"]


def test_policies_let_in_whom_the_networks_of_compose_let_in() -> None:
    policies = of_kind("NetworkPolicy")
    assert policies["nobody"]["spec"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "reprise"}}, "policyTypes": ["Ingress"],
    }  # fmt: skip
    assert all(
        "app.kubernetes.io/part-of" in one["spec"]["template"]["metadata"]["labels"] for one in WORKLOADS.values()
    )
    let_in = {}
    for name in WORKLOADS:
        (rule,) = policies[name]["spec"]["ingress"]
        let_in[name] = {one["podSelector"]["matchLabels"][NAME] for one in rule.get("from", ()) if "podSelector" in one}
        (port,) = of_kind("Service")[name]["spec"]["ports"]
        assert [one["port"] for one in rule["ports"]] == [port["port"]]
    assert let_in == {
        "gateway": set(), "replica": {"gateway"}, "directory": {"gateway", "replica"}, "kv": {"replica"},
    }  # fmt: skip
