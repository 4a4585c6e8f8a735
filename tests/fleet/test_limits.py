"""The limits of a key hold over the whole fleet: two gateways, two replicas, one Redis, on real sockets."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reprise.fleet.directory_redis
from reprise.app.tenancy.keyring import digest_of
from reprise.fleet.keys import SessionName
from tests.app.fakes import FakeEngine, Script, until
from tests.fleet.small_fleet import CHAT, SmallFleet, bearer, chat, small_fleet
from tests.redis_servers import RedisServer, redis_server

KEY, OTHER, ADMIN = "key-of-alice", "key-of-bob", "key-of-admin"
TENANT = digest_of(KEY).hex()[:16]
WAIT_S = 100.0  # for what takes milliseconds on a quiet machine
KEYS = {"api_keys": (KEY, OTHER), "admin_keys": (ADMIN,)}


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


def fleet_of(redis: RedisServer, tmp_path: Any, **limits: Any):
    return small_fleet(redis, tmp_path, "a", "b", gateways=2, server=KEYS, limits=limits)


class Clock:
    """The clock by which Redis' scripts tell the time, ahead of the real one, so that no beat seems old."""

    def __init__(self, redis: RedisServer, directory: Path) -> None:
        from redis import Redis

        self._redis = Redis.from_url(redis.url)
        self._us = int((time.time() + 86_400) * 1e6)
        self.advance(0)
        for script in Path(reprise.fleet.directory_redis.__file__).with_name("scripts").glob("*.lua"):
            text = script.read_text()
            here = "{math.floor(redis.call('GET', 'clock') / 1000000), redis.call('GET', 'clock') % 1000000}"
            (directory / script.name).write_text(text.replace("redis.call('TIME')", here))

    def advance(self, seconds: float) -> None:
        self._us += int(seconds * 1e6)
        self._redis.set("clock", self._us)


@pytest.fixture
def clock(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Clock:
    scripts = tmp_path_factory.mktemp("scripts")
    monkeypatch.setattr(reprise.fleet.directory_redis, "_SCRIPTS", scripts)
    return Clock(redis, scripts)


class Asking:
    """Asks both gateways in turn, as fast as they answer."""

    def __init__(self, fleet: SmallFleet) -> None:
        self._gateways = itertools.cycle(fleet.gateways)
        self._number = itertools.count()
        self.requests = self.tokens = 0

    async def once(self) -> bool:
        """Returns whether it was answered."""
        body = chat(f"Hello number {next(self._number)}")
        answer = await next(self._gateways).post(CHAT, json=body, headers=bearer(KEY))
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(answer.headers["retry-after"]) >= 1
            return False
        assert answer.status_code == 200, answer.text
        self.requests += 1
        self.tokens += answer.json()["usage"]["total_tokens"]
        return True

    async def until_refused(self) -> None:
        while await self.once():
            pass


@pytest.mark.parametrize(("what", "kind"), [("requests", "r"), ("tokens", "k")])
async def test_a_key_gets_its_minute_once_however_many_gateways_it_asks(redis, clock, tmp_path, what, kind):
    per_minute, steps, step_s = (40, 15, 4.0) if what == "requests" else (2400, 20, 3.0)
    async with fleet_of(redis, tmp_path, **{f"key_{what}_per_minute": per_minute}) as fleet:
        asking = Asking(fleet)
        await fleet.watcher.take(TENANT, kind, per_minute=per_minute, amount=per_minute, need=0)  # it begins empty
        assert not await asking.once()
        for _ in range(steps):
            clock.advance(step_s)
            await asking.until_refused()
        allowed = steps * step_s * per_minute / 60
        assert 0.95 * allowed <= getattr(asking, what) <= 1.02 * allowed
        one = chat("Hello from somebody else")
        assert (await fleet.gateways[0].post(CHAT, json=one, headers=bearer(OTHER))).status_code == 200


async def test_answers_under_way_count_over_the_fleet_in_choices(redis, tmp_path):
    async with fleet_of(redis, tmp_path, key_requests=3) as fleet:
        for running in fleet.replicas.values():
            running.engine.script.start_s = 3600.0
        one, other = fleet.gateways
        both = [
            asyncio.create_task(gateway.post(CHAT, json=chat(n=n), headers=bearer(KEY)))
            for gateway, n in ((one, 1), (other, 2))
        ]
        await until(lambda: submitted(fleet) == 2 or any(task.done() for task in both), WAIT_S)
        assert submitted(fleet) == 2, [task.result().text for task in both if task.done()]
        for gateway in fleet.gateways:
            refused = await gateway.post(CHAT, json=chat(), headers=bearer(KEY))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "may (3)" in refused.json()["error"]["message"]
            assert refused.headers["x-ratelimit-limit-requests"] == "3"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        for running in fleet.replicas.values():
            running.engine.script.start_s = 0.0
            for request in running.engine.submitted:
                running.engine.finish_all()
                assert request.num_choices in (1, 2)
        answers = await asyncio.gather(*both)
        assert [answer.status_code for answer in answers] == [200, 200]
        for _ in range(4):  # a client that has its answer may ask again at once
            assert (await one.post(CHAT, json=chat(n=3), headers=bearer(KEY))).status_code == 200


async def test_sessions_and_bytes_count_over_the_fleet(redis, tmp_path):
    async with fleet_of(redis, tmp_path, key_sessions=2) as fleet:
        a, b = (fleet.replicas[name] for name in "ab")
        for running in (a, b):
            running.app.state.quotas._look_s = 0.01
        for session, running in (("s1", a), ("s2", b), ("s3", a)):
            body = chat(session_id=session)
            assert (await running.http.post(CHAT, json=body, headers=bearer(KEY))).status_code == 200
        await _held(fleet, 2)
        fingerprint = a.engine.model.fingerprint
        known = [await fleet.watcher.look(SessionName(TENANT, name), fingerprint=fingerprint) for name in ("s1", "s3")]
        assert [record is not None for record in known] == [False, True]
        await fleet.beat()
        names = {session for _, session in await a.app.state.text_thread.names()}
        assert names == {"s3"}, "what left the fleet leaves its replicas"


async def test_who_pins_too_much_is_refused_by_every_replica(redis, tmp_path):
    async with fleet_of(redis, tmp_path, key_sessions=1) as fleet:
        a = fleet.replicas["a"]
        a.app.state.quotas._look_s = 0.01
        post = a.http.post
        for session in ("s1", "s2"):
            await a.app.state.hooks.keep(session, tenant=TENANT, ttl_s=None)
            assert (await post(CHAT, json=chat(session_id=session), headers=bearer(KEY))).status_code in (200, 429)
            await a.app.state.hooks.keep(session, tenant=TENANT, ttl_s=None)

        async def answered(status: int) -> Any:
            async with asyncio.timeout(WAIT_S):
                while True:
                    answer = await post(CHAT, json=chat(session_id="s3"), headers=bearer(KEY))
                    if answer.status_code == status:
                        return answer
                    await asyncio.sleep(0.02)

        assert (await answered(429)).json()["error"]["code"] == "quota_exceeded"
        await fleet.watcher.keep(TENANT, "s1", ttl_s=60.0)
        await answered(200)


async def test_without_redis_each_gateway_and_replica_counts_by_itself(redis, tmp_path):
    limits = {"key_requests_per_minute": 5, "key_requests": 4}
    async with fleet_of(redis, tmp_path, **limits) as fleet:
        redis.stop()
        statuses = [
            (await gateway.post(CHAT, json=chat(), headers=bearer(KEY))).status_code
            for gateway in fleet.gateways
            for _ in range(8)
        ]
        answered = statuses.count(200)
        assert 5 <= answered <= 10, "at most once for every gateway"
        assert set(statuses) == {200, 429}


async def test_a_resumed_answer_is_not_refused_for_tokens_that_it_has_used_itself(redis, tmp_path):
    async with fleet_of(redis, tmp_path, key_tokens_per_minute=10) as fleet:
        script = Script(answer="Hello there, how are you today?", step_s=0.2)
        engines: list[FakeEngine] = [running.engine for running in fleet.replicas.values()]
        for engine in engines:
            engine.script = script
        text, has_died = "", False
        body = chat(stream=True)
        async with fleet.gateways[0].stream("POST", CHAT, json=body, headers=bearer(KEY)) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_text():
                text += piece
                if text.count('"content":"') >= 3 and not has_died:
                    (stream,) = (stream for engine in engines for stream in engine.streams)
                    assert stream.open, "the answer was over before its replica died"
                    stream.lose()
                    has_died = True
        assert text.rstrip().endswith("[DONE]")
        assert sum(len(engine.submitted) for engine in engines) == 2


def submitted(fleet: SmallFleet) -> int:
    return sum(len(running.engine.submitted) for running in fleet.replicas.values())


async def _held(fleet: SmallFleet, sessions: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await fleet.watcher.held(TENANT)).sessions != sessions:  # noqa: ASYNC110 - what Redis says
            await asyncio.sleep(0.02)
