"""Tests how a gateway is composed of settings, and how it ends."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reprise.app.cli.program import cli
from reprise.app.settings.settings import Settings
from reprise.fleet import directory_redis
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


@pytest.mark.parametrize("kind", ["fails", "hangs"])
async def test_a_dead_redis_does_not_end_a_gateway_with_an_error(tmp_path, monkeypatch, kind):
    """An error of closing a connection, such as uvloop's RuntimeError, would be printed as a traceback."""
    pytest.importorskip("redis")
    monkeypatch.setattr(directory_redis, "CLOSE_S", 0.05)
    settings = settings_of(tmp_path, redis_url="redis://127.0.0.1:1/0")
    server = GatewayServer(settings, on_ready=lambda url: None)
    pool = server._gateway.parts.directory._server.client.connection_pool

    async def disconnect(*_: object, **__: object) -> None:
        if kind == "hangs":
            await asyncio.sleep(60)
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(pool, "disconnect", disconnect)
    told: list[str] = []
    asked = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        return {"type": next(asked)}

    async def send(message: Any) -> None:
        told.append(message["type"])

    await asyncio.wait_for(server._gateway({"type": "lifespan"}, receive, send), 10)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
