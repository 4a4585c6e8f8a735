"""Tests `reprise fleet` against a gateway on a real socket."""

import asyncio
import json
import os
import sys
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from reprise.app.cli.fleet_command import cli
from reprise.fleet.keys import SessionName
from tests.fleet.gateway.harness import fleet, one_answer, record

KEYS = {"server": {"admin_keys": ("key-of-admin",), "api_keys": ("key-of-alice",)}}


async def call(whole, *words: str, key: str | None = None) -> Result:
    """Run the program on a thread, as the gateway runs on this loop."""
    environment = {"REPRISE_KEY": key, "COLUMNS": "200"}
    url = f"http://127.0.0.1:{whole.port}"
    return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--url", url], env=environment)


async def test_status_shows_the_replicas():
    async with fleet(a=one_answer, b=one_answer) as whole:
        whole.hear("b", state="loading", load=None)
        await whole.refresh()
        shown = await call(whole, "status")
        assert shown.exit_code == 0
        lines = [line.split()[:3] for line in shown.stdout.splitlines()[1:]]
        assert lines == [["a", "ready", "m"], ["b", "loading", "m"]]


async def test_drain_and_move():
    async with fleet(a=one_answer, b=one_answer) as whole:
        assert (await call(whole, "drain", "a")).exit_code == 0
        assert whole.directory.drained == {"a"}
        assert (await call(whole, "drain", "a", "--off")).exit_code == 0
        assert whole.directory.drained == set()
        whole.directory.records[SessionName("local", "s")] = record("a")
        assert (await call(whole, "move", "s", "b")).exit_code == 0
        assert whole.directory.records[SessionName("local", "s")].wanted == "b"
        refused = await call(whole, "move", "unknown", "b")
        assert refused.exit_code == 1
        assert "unknown" in refused.stderr


async def test_a_key_is_taken_from_the_environment():
    async with fleet(KEYS, a=one_answer) as whole:
        refused = await call(whole, "status")
        assert refused.exit_code == 1
        assert "REPRISE_KEY" in refused.stderr
        assert (await call(whole, "status", key="key-of-alice")).exit_code == 1
        assert (await call(whole, "status", key="key-of-admin")).exit_code == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://["])
def test_says_that_no_gateway_answers(url):
    told = CliRunner().invoke(cli, ["status", "--url", url])
    assert told.exit_code == 1
    assert "no gateway answers" in told.stderr


async def test_something_else_may_answer():
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"detail": "no"}).encode()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 X\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        told = await asyncio.to_thread(CliRunner().invoke, cli, ["status", "--url", url])
    assert told.exit_code == 1
    assert "answered 404" in told.stderr


@pytest.fixture
def own_environment():
    """Keep what `up` sets for its servers from other tests."""
    with mock.patch.dict(os.environ):
        yield


def test_a_fleet_needs_a_redis(own_environment):
    refused = CliRunner().invoke(cli, ["up"])
    assert refused.exit_code == 1
    assert "fleet.redis_url" in refused.stderr


@pytest.mark.parametrize("words", [["up", "--fleet.redis_url", "redis://127.0.0.1:1/0"], ["deploy"]])
def test_a_fleet_needs_ray(own_environment, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "reprise.fleet.ray_app", raising=False)
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code == 1
    assert "pip install '.[fleet]'" in refused.stderr


def test_servers_get_their_settings_by_the_environment(own_environment, tmp_path):
    config = tmp_path / "fleet.toml"
    config.write_text('fleet.redis_url = "redis://127.0.0.1:1/0"\n')
    words = ["--config", str(config), "--replicas", "3", "--host", "127.0.0.2", "--port", "9", "--cache.dram_gib", "2"]
    with mock.patch("reprise.fleet.supervise.local_fleet.LocalFleet") as started:
        assert CliRunner().invoke(cli, ["up", *words]).exit_code == 0
    assert os.environ["REPRISE_CACHE__DRAM_GIB"] == "2"
    assert "REPRISE_SERVER__PORT" not in os.environ, "it is the gateway's"
    (_, scale), given = started.call_args
    assert scale.replicas == 3
    assert given["gateway"] == ["--host", "127.0.0.2", "--port", "9", "--config", str(config)]
