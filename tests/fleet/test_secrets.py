"""Tests of the files that a fleet shares, against a real Redis that reads them."""

import json
import stat
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise.app.cli.fleet_command import cli
from reprise.app.settings.sources import load_settings
from reprise.app.state_dir import load_tenant_secret
from reprise.app.tenancy.configured_keys import make_keyring
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.keys import SessionName
from reprise.fleet.records import Commit, Heartbeat, Place
from reprise.fleet.secrets import RAY_PASSWORD, SecretsExist, make_secrets
from tests.redis_servers import RedisServer, redis_server

NAME = SessionName("alice", "a chat")
HOSTS = {"directory_host": "directory:6379", "kv_host": "kv:6379"}
MODEL = "ab" * 16


@pytest.fixture
def made(tmp_path: Path) -> Path:
    assert {path.name for path in make_secrets(tmp_path / "fleet", **HOSTS)} == {
        path.name for path in (tmp_path / "fleet").iterdir() if path.name != "keys.toml"
    }
    return tmp_path / "fleet"


def test_the_program_reads_them(made: Path, tmp_path: Path) -> None:
    environ = {
        "REPRISE_SERVER__TENANT_SECRET_FILE": str(made / "tenant_secret"),
        "REPRISE_SERVER__KEYS_FILE": str(made / "keys.toml"),
        "REPRISE_CACHE__REDIS_GIB": "1",
    }
    replica = load_settings(flags={}, environ=environ, config=made / "replica.toml")
    gateway = load_settings(flags={}, environ={}, config=made / "gateway.toml")
    assert replica.fleet.redis_url.endswith("@directory:6379/0")
    assert replica.cache.redis_url.endswith("@kv:6379/0")
    assert gateway.fleet.redis_url.startswith("redis://gateway:")
    assert not gateway.cache.redis_url
    assert len(load_tenant_secret(tmp_path, replica.server.tenant_secret_file)) == 32
    keyring = make_keyring(replica)
    client, prometheus = (
        keyring.tenant(f"Bearer {(made / name).read_text()}") for name in ("client_key", "prometheus_key")
    )
    assert client is not None
    assert not keyring.is_admin(client)
    assert prometheus is not None
    assert keyring.is_admin(prometheus)


def test_only_who_needs_a_file_may_read_it(made: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o640} == {
        "directory.acl", "kv.acl", "prometheus_key", "grafana_password", "redis_passwords.json",
    }  # fmt: skip
    assert set(modes.values()) == {0o600, 0o640}
    urls = [tomllib.loads((made / name).read_text())["fleet"]["redis_url"] for name in ("replica.toml", "gateway.toml")]
    for acl in ("directory.acl", "kv.acl"):
        assert not any(url.split(":")[2].split("@")[0] in (made / acl).read_text() for url in urls)


def test_what_is_there_stays(made: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    assert make_secrets(made, **HOSTS) == []
    (made / "grafana_password").unlink()
    assert [path.name for path in make_secrets(made, **HOSTS)] == ["grafana_password"]
    after = {path.name: path.read_bytes() for path in made.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"grafana_password"}
    (made / "kv.acl").unlink()
    with pytest.raises(SecretsExist, match=r"lacks kv\.acl"):
        make_secrets(made, **HOSTS)


def test_the_command_says_what_it_made_and_no_secret(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["secrets", str(tmp_path / "fleet"), "--directory", "10.0.0.1:6379"])
    assert result.exit_code == 0, result.output
    assert "tenant_secret is made" in result.output
    assert (tmp_path / "fleet" / "client_key").read_text() not in result.output
    assert "10.0.0.1:6379" in (tmp_path / "fleet" / "gateway.toml").read_text()
    (tmp_path / "fleet" / "kv.acl").unlink()
    assert CliRunner().invoke(cli, ["secrets", str(tmp_path / "fleet")]).exit_code == 1


# --- what Redis lets them do ------------------------------------------------------------------------------------------


@pytest.fixture
def server(made: Path, tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path, "--aclfile", str(made / "directory.acl")) as running:
        yield running


def url_of(made: Path, server: RedisServer, user: str) -> str:
    url = tomllib.loads((made / f"{user}.toml").read_text())["fleet"]["redis_url"]
    return server.url.replace("unix://", f"unix://{url.removeprefix('redis://').partition('@')[0]}@")


@pytest.fixture
async def replica(made: Path, server: RedisServer) -> AsyncIterator[Directory]:
    found = Directory(url=url_of(made, server, "replica"), secret=bytes(32), deadline_s=30, replica="a", boot="1")
    yield found
    await found.close()


@pytest.fixture
async def gateway(made: Path, server: RedisServer) -> AsyncIterator[Directory]:
    found = Directory(url=url_of(made, server, "gateway"), secret=bytes(32), deadline_s=30)
    yield found
    await found.close()


def beat() -> Heartbeat:
    return Heartbeat(
        replica="a", boot="1", url="http://a:8000", fingerprint=MODEL, model="m", aliases=(), state="ready",
        version="1", running=0, waiting=0, load=None,
    )  # fmt: skip


async def commit_a_turn(replica: Directory) -> None:
    await replica.beat(beat(), since=0)
    claim = await replica.claim(NAME, fingerprint=MODEL, ttl_s=60)
    turn = Commit(
        name=NAME, fingerprint=MODEL, epoch=claim.epoch, since=claim.epoch, base_turn=0, nonce=bytes(8),
        ends_turn=True, tokens=9, size_bytes=9, redis_tokens=0, ttl_s=60, head=b"head", rows={b"x" * 16: b"row"},
        chains=(b"c" * 16,),
    )  # fmt: skip
    done = await replica.commit(turn)
    assert done.outcome == "committed"


async def test_each_may_do_what_it_does(replica: Directory, gateway: Directory) -> None:
    await commit_a_turn(replica)
    assert await replica.transcript(NAME, fingerprint=MODEL) == {b"x" * 16: b"row"}
    await replica.forget(NAME.tenant, "another")
    await replica.take("alice", "k", per_minute=10, amount=1, need=0)
    assert [member.beat.replica for member in (await gateway.members()).members] == ["a"]
    found = await gateway.find("alice", [b"c" * 16], fingerprint=MODEL)
    assert found is not None
    assert found.home == "a"
    assert (await gateway.look(NAME, fingerprint=MODEL)) is not None
    assert await gateway.move(NAME, fingerprint=MODEL, replica="a")
    await gateway.drain("a", on=True)
    await gateway.drain("a", on=False)
    await gateway.take("alice", "r", per_minute=10, amount=1, need=1)
    place = Place("alice", "lease", 2)
    assert await gateway.enter(place, most=2, lease_s=60) == (True, 2)
    await gateway.renew([place], lease_s=60)
    await gateway.leave_places(place)
    assert (await replica.held("alice", count=9, longest_s=60)).sessions == 1
    await replica.keep("alice", NAME.session_id, ttl_s=None)
    assert await replica.begun([NAME], fingerprint=MODEL) == [found.epoch]
    await replica.release(NAME, fingerprint=MODEL, epoch=found.epoch)
    await replica.leave()


async def test_a_gateway_reads_no_transcript_and_deletes_nothing(replica: Directory, gateway: Directory) -> None:
    await commit_a_turn(replica)
    with pytest.raises(DirectoryUnavailable, match="NoPermission"):
        await gateway.transcript(NAME, fingerprint=MODEL)
    gateway.born = replica.born
    with pytest.raises(DirectoryUnavailable):
        await gateway.forget(NAME.tenant, NAME.session_id)
    assert await replica.transcript(NAME, fingerprint=MODEL) != {}


async def test_nobody_may_what_harms_others_and_without_a_password_nobody_may_anything(
    made: Path, server: RedisServer
) -> None:
    from redis.asyncio import Redis
    from redis.exceptions import AuthenticationError, NoPermissionError

    for user in ("replica", "gateway"):
        client = Redis.from_url(url_of(made, server, user), protocol=2)
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST"), ("SET", "other", "1")):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)
        await client.aclose()
    password = (made / RAY_PASSWORD).read_text()
    ray = Redis.from_url(server.url, username="ray", password=password, protocol=2)
    await ray.hset("RAYreprise@NODE", "a", "b")
    assert await ray.delete("DUMMY") == 0
    assert "redis_version" in await ray.info("server")
    for command in (("GET", "r1:born"), ("HSET", "r1:m", "a", "b"), ("FLUSHALL",), ("KEYS", "*")):
        with pytest.raises(NoPermissionError):
            await ray.execute_command(*command)
    await ray.aclose()
    password = json.loads((made / "redis_passwords.json").read_text())["redis://metrics@directory:6379"]
    metrics = Redis.from_url(server.url, username="metrics", password=password, protocol=2)
    assert "used_memory" in await metrics.info("memory")
    for command in (("GET", "r1:born"), ("SET", "r1:born", "1"), ("CONFIG", "SET", "maxmemory", "1")):
        with pytest.raises(NoPermissionError):
            await metrics.execute_command(*command)
    await metrics.aclose()
    stranger = Redis.from_url(server.url, protocol=2)
    with pytest.raises(AuthenticationError):
        await stranger.get("r1:born")
    await stranger.aclose()
    health = Redis.from_url(server.url, username="health", password="any", protocol=2)
    assert await health.ping()
    with pytest.raises(NoPermissionError):
        await health.get("r1:born")
    await health.aclose()
