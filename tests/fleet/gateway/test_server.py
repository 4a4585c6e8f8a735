"""Tests how a gateway is composed of settings, and how it ends."""

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise.app.cli.program import cli
from reprise.app.settings.settings import Settings
from reprise.fleet.gateway.server import GatewayServer, NoFleet, make_gateway


def settings_of(directory: Path, **fleet: object) -> Settings:
    cache = {"disk_dir": directory}
    return Settings.model_validate({"server": {"port": 0}, "cache": cache, "fleet": fleet})


def test_a_gateway_needs_a_fleet(tmp_path):
    with pytest.raises(NoFleet, match="needs fleet"):
        make_gateway(settings_of(tmp_path))
    told = CliRunner().invoke(cli, ["gateway", "--cache.disk_dir", str(tmp_path)])
    assert told.exit_code == 1
    assert "fleet.redis_url" in told.stderr


def test_the_first_signal_drains_and_the_second_ends(tmp_path):
    pytest.importorskip("redis")
    server = GatewayServer(settings_of(tmp_path, redis_url="redis://127.0.0.1:1/0"), on_ready=lambda url: None)
    server.handle_exit(signal.SIGTERM, None)
    assert server._gateway.is_draining
    assert not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert server.force_exit


async def test_a_gateway_without_requests_ends_at_once(tmp_path):
    pytest.importorskip("redis")
    server = GatewayServer(settings_of(tmp_path, redis_url="redis://127.0.0.1:1/0"), on_ready=lambda url: None)
    server._gateway.under_way = 1
    server.handle_exit(signal.SIGTERM, None)
    assert not await server.on_tick(1)
    server._gateway.under_way = 0
    assert await server.on_tick(1)
