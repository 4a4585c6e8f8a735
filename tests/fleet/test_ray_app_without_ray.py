"""Tests what Ray Serve is told of a fleet, and what a replica does that Serve has made. `test_ray_app.py` has the same
with Ray."""

import importlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reprise.app.settings.sources import load_settings
from reprise.fleet.scaling import WINDOW_S
from reprise.fleet.supervise.owned_server import Unhealthy, drain_s
from tests.fleet.supervise.fake_ray import FakeRay, fake_ray

SOON_S = 30.0


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray() as ray:
        os.environ["REPRISE_FLEET__REDIS_URL"] = "redis://127.0.0.1:1/0"
        yield ray


@pytest.fixture
def ray_app(ray) -> Any:
    return importlib.import_module("reprise.fleet.ray_app")


def test_the_number_of_replicas_is_fixed_unless_there_may_be_more(ray_app):
    for most in (None, 1, 2):
        deployed = ray_app.app(ray_app.Options(replicas=2, most_replicas=most)).deployed
        assert deployed["num_replicas"] == 2
        assert "autoscaling_config" not in deployed


def test_where_there_may_be_more_our_policy_decides(ray_app):
    options = ray_app.Options(replicas=2, most_replicas=5, ttft_target_s=0.5, downscale_delay_s=60.0)
    deployed = ray_app.app(options).deployed
    scaling = deployed["autoscaling_config"]
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 5)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.look_back_period_s) == (0.0, 60.0, WINDOW_S)
    module, name = scaling.policy.policy_function.split(":")
    made = getattr(importlib.import_module(module), name)(**scaling.policy.policy_kwargs)
    assert callable(made)
    assert scaling.policy.policy_kwargs == {"ttft_target_s": 0.5}
    assert "num_replicas" not in deployed


def test_a_replica_is_placed_and_has_time_to_end(ray_app, tmp_path):
    config = tmp_path / "fleet.toml"
    config.write_text("[server]\ndrain_s = 77\n")
    options = ray_app.Options(cpus=2, gpus=0.5, resources={"fast": 1.0}, config=str(config), version="7")
    application = ray_app.app(options)
    assert application.deployed["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.5, "resources": {"fast": 1.0}}
    settings = load_settings(flags={}, environ=os.environ, config=config)
    assert application.deployed["graceful_shutdown_timeout_s"] > drain_s(settings) > 77
    assert (application.made_of, application.arguments) == (ray_app.Replica, (str(config), "7"))


def test_settings_that_describe_no_fleet_are_refused(ray_app):
    del os.environ["REPRISE_FLEET__REDIS_URL"]
    with pytest.raises(ValueError, match=r"fleet\.redis_url"):
        ray_app.app(ray_app.Options())


@dataclass
class FakeServer:
    """An `OwnedServer` that starts nothing."""

    config: Path | None
    node_ip: str
    is_draining: bool = False
    is_ready: bool = False
    drains: int = 0
    health: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    async def ready(self) -> None:
        self.is_ready = True

    async def check(self) -> None:
        if self.health is not None:
            raise self.health

    async def load(self) -> dict[str, float]:
        return {"wait_s": 1.0, "busy": 0.5}

    def wait(self) -> None:
        assert self.ended.wait(SOON_S)

    def drain(self) -> None:
        self.drains += 1
        self.is_draining = True
        self.ended.set()


@pytest.fixture
def exits(ray_app, monkeypatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(ray_app.os, "_exit", statuses.append)
    return statuses


async def made(ray_app: Any, config: str | None = None) -> tuple[Any, FakeServer]:
    """Make a replica as Serve does, which awaits its constructor."""
    servers: list[FakeServer] = []

    def start(settings: Any, *, config: Path | None, node_ip: str) -> FakeServer:
        assert settings.fleet.is_on
        servers.append(FakeServer(config, node_ip))
        return servers[0]

    ray_app.OwnedServer = start
    replica = ray_app.Replica.__new__(ray_app.Replica)
    await replica.__init__(config, "")
    return replica, servers[0]


def watcher() -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == "end with server")


async def test_a_replica_is_its_server(ray_app, exits, tmp_path):
    (config := tmp_path / "fleet.toml").touch()
    replica, server = await made(ray_app, str(config))
    assert (server.config, server.node_ip, server.is_ready) == (config, "10.0.0.7", True)
    await replica.check_health()
    server.health = Unhealthy("it does not answer")
    with pytest.raises(Unhealthy):
        await replica.check_health()
    assert await replica.record_autoscaling_stats() == {"wait_s": 1.0, "busy": 0.5}
    server.drain()


async def test_a_replica_drains_its_server_and_does_not_fail_by_that(ray_app, exits):
    replica, server = await made(ray_app)
    watching = watcher()
    replica.__del__()
    watching.join(SOON_S)
    assert (server.drains, exits) == (1, [])


async def test_a_replica_ends_with_its_server(ray_app, exits):
    _, server = await made(ray_app)
    watching = watcher()
    server.ended.set()
    watching.join(SOON_S)
    assert exits == [1], "Serve replaces a process that is gone at once"


def test_a_replica_whose_server_did_not_start_has_nothing_to_drain(ray_app):
    ray_app.Replica.__new__(ray_app.Replica).__del__()
