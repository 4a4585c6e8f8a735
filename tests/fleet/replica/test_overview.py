"""GET /v1/fleet of a replica."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.fakes import FakeEngine, in_process, make_settings, write_tokenizer
from tests.redis_servers import RedisServer, redis_server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


def settings_of(directory: Path, redis: RedisServer, **sections: dict):
    fleet = {"redis_url": redis.url, "replica": "a", "deadline_ms": 5000.0}
    return make_settings(directory, **{"fleet": fleet, **sections})


async def test_a_replica_shows_its_fleet(redis, model_dir, tmp_path):
    async with in_process(FakeEngine(model_dir), settings_of(tmp_path, redis)) as running:
        replica = running.app.state.hooks
        await replica.beat()
        await running.chat("Hello", session_id="s")
        await replica.beat()
        told = (await running.http.get("/v1/fleet")).json()
        (one,) = told["replicas"]
        assert (one["replica"], one["state"], one["sessions"], one["model"]) == ("a", "ready", 1, "test-model")
        assert one["tiers"]["dram"] == {"used_bytes": 1000, "capacity_bytes": 4000}
        assert (told["kv"], told["gateway"]) == (None, None)
        assert (await running.http.get("/v1/fleet?limit=0")).status_code == 400


async def test_a_server_in_no_fleet_has_none(model_dir, tmp_path):
    async with in_process(FakeEngine(model_dir), make_settings(tmp_path)) as running:
        answer = await running.http.get("/v1/fleet")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_the_fleet_is_shown_to_admins(redis, model_dir, tmp_path):
    server = {"api_keys": ("key-of-alice",), "admin_keys": ("key-of-admin",)}
    async with in_process(FakeEngine(model_dir), settings_of(tmp_path, redis, server=server)) as running:
        for key, status in (("key-of-alice", 403), ("key-of-admin", 200)):
            answer = await running.http.get("/v1/fleet", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
