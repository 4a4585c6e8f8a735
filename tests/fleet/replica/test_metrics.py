"""Tests of what a replica tells Prometheus, and of the address that it tells gateways."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.api.reprise.test_ops import samples
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, write_tokenizer
from tests.fleet.test_outbox import unsent
from tests.redis_servers import RedisServer, redis_server


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


async def counts(running: Running) -> dict[str, float]:
    """Return what is not 0."""
    values = samples((await running.http.get("/metrics")).text)
    own = {
        ".".join((name.removeprefix("reprise_fleet_"), *(value for _, value in labels))): number
        for (name, labels), number in values.items()
        if name.startswith("reprise_fleet_") and not name.endswith("_created")
    }
    return {name: number for name, number in own.items() if number}


async def test_claims_commits_and_the_outbox_are_counted(redis: RedisServer, tmp_path: Path) -> None:
    fleet = {"redis_url": redis.url, "deadline_ms": 5000.0}
    engine = FakeEngine(directory=write_tokenizer(tmp_path))
    async with in_process(engine, make_settings(tmp_path / "state", fleet=fleet)) as running:
        replica = running.app.state.hooks
        await replica.beat()
        await running.chat("Hello", session_id="s")
        assert await counts(running) == {"claims_total.new": 1, "commits_total.committed": 1}
        await running.chat("Again", session_id="s")
        assert await counts(running) == {
            "claims_total.new": 1, "claims_total.home": 1, "commits_total.committed": 2,
        }  # fmt: skip
        redis.stop()
        await running.chat("Hello", session_id="t")
        found = await counts(running)
        assert found["claims_total.failed"] == 1
        assert found["commits_total.unsent"] == 1
        redis.start()
        await replica.directory.close()  # closed, or it would be left alone for a second
        running.app.state.hooks.directory._server._breaker.succeeded()
        await replica.beat()
        assert (await counts(running)).get("outbox_sessions", 0) == replica.outbox.waiting


async def test_the_outbox_keeps_turns_that_end_at_once(redis: RedisServer, tmp_path: Path) -> None:
    engine = FakeEngine(directory=write_tokenizer(tmp_path))
    async with in_process(engine, make_settings(tmp_path / "state", fleet={"redis_url": redis.url})) as running:
        redis.stop()
        replica = running.app.state.hooks
        waiting = [unsent(f"chat-{n}", tenant="local") for n in range(300)]
        await asyncio.gather(*(replica.outbox.put(entry) for entry in waiting))
        assert (replica.outbox.waiting, replica.outbox.dropped) == (300, 0), "one transaction at a time"
