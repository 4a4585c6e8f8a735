"""Tests when a Ray cluster is told to run the servers, and that it is always left again. Needs no Ray."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.supervise.fake_ray import FakeRay, fake_ray

SETTINGS = '[fleet]\nredis_url = "redis://127.0.0.1:1/0"\n'


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray() as ray:
        yield ray


@pytest.fixture
def options(ray, tmp_path) -> Any:
    config = tmp_path / "fleet.toml"
    config.write_text(SETTINGS)
    return importlib.import_module("reprise.fleet.ray_app").Options(replicas=3, config=str(config))


def deploy(options: Any, *, replace: bool = False) -> bool:
    return importlib.import_module("reprise.fleet.supervise.cluster").deploy(options, replace=replace)


def test_it_joins_deploys_and_leaves(ray, options):
    assert deploy(options)
    assert ray.calls == ["init", "start", "run", "shutdown"]
    assert ray.init_options["address"] == "auto", "it joins what is there, and starts no cluster"
    assert ray.start_options["proxy_location"] == "Disabled"
    assert ray.runs[0].deployed["num_replicas"] == 3
    assert ray.run_options == {"name": "reprise", "route_prefix": None}


@pytest.mark.parametrize(
    ("status", "replace", "is_to_do"),
    [
        ("RUNNING", False, False),
        ("DEPLOYING", False, False),
        ("DEPLOY_FAILED", False, True),
        ("RUNNING", True, True),
        ("DEPLOYING", True, True),
    ],
)
def test_servers_that_run_are_replaced_only_if_it_is_asked_to(ray, options, status, replace, is_to_do):
    ray.show(status)
    assert deploy(options, replace=replace) is is_to_do
    assert ray.calls == (["init", "start", "run", "shutdown"] if is_to_do else ["init", "start", "shutdown"])


@pytest.mark.parametrize("part", ["on_start", "on_run"])
def test_it_leaves_also_where_it_fails(ray, options, part):
    def refuse() -> None:
        raise RuntimeError("no room")

    setattr(ray, part, refuse)
    with pytest.raises(RuntimeError, match="no room"):
        deploy(options)
    assert ray.calls[-1] == "shutdown"


def test_without_a_cluster_it_says_so(ray, options):
    def refuse() -> None:
        raise ConnectionError("no cluster")

    ray.on_init = refuse
    with pytest.raises(ConnectionError, match="no cluster"):
        deploy(options)
    assert ray.calls == ["init"]
