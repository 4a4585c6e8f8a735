"""Tests that an unreliable Redis, whatever it answers or stores, causes no 500 and reveals no other client's text."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise.app.conversations import redis_store
from reprise.app.conversations.response_store import NotStored, TooLong
from reprise.app.conversations.stored_records import BadRecord, item_of, items_of, response_of
from reprise.app.errors import ApiError
from tests.app.conversations.test_response_store import DAY_S, body, items, redis_server
from tests.app.fakes import FakeEngine, in_process, make_settings
from tests.resetting_server import resetting_server

pytest.importorskip("redis")
__all__ = ["redis_server"]

KEY = b"reprise:response:t:a"


class FakeRedis:
    """Accepts connections and answers every command with `reply`, whatever it was, but for the client's greetings."""

    def __init__(self) -> None:
        self.reply, self.commands, self.port = b"", 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while header := await reader.readline():
                words = []
                for _ in range(int(header[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                if words[0] in (b"CLIENT", b"SELECT", b"HELLO"):
                    writer.write(b"+OK\r\n")
                    continue
                self.commands += 1
                writer.write(self.reply)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def fake_redis() -> AsyncIterator[FakeRedis]:
    fake = FakeRedis()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()


def make_store(fake: FakeRedis) -> redis_store.RedisStore:
    return redis_store.RedisStore(url=f"redis://127.0.0.1:{fake.port}/0", max_bytes=1 << 20, ttl_s=DAY_S)


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def array(*replies: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(replies), b"".join(replies))


def row(name: bytes = KEY, said: object = None, own: bytes = b"[]", previous: bytes = b"") -> bytes:
    data = said if isinstance(said, bytes) else json.dumps(body("a") if said is None else said).encode()
    return array(bulk(name), bulk(data), bulk(own), bulk(previous))


DEEP = b"[" * 100_000 + b"]" * 100_000
FAR = b'{"id":"a","status":"completed","background":false,"output":[],"x":' + b"[" * 400 + b"]" * 400 + b"}"
GARBAGE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00\xff\xfe\r\n",
    b"$99999999999\r\nxx",
    b"$-5\r\n",
    b"$\r\n",
    b"*1000000000\r\n" + b":1\r\n" * 100,
    b"*1\r\n" * 100_000,
    b":" + b"9" * 6000 + b"\r\n",
    b"x" * 200_000,
    b"+OK\r\n",
    b":7\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
]
RECORDS = [
    row(name=b"reprise:response:u:a"),
    row(name=b"reprise:response:t:b"),
    row(name=b""),
    row(said=b""),
    row(said=b"\xff\xfe"),
    row(said=DEEP),
    row(said=FAR),
    row(said=body("another")),
    row(said={"id": "a"}),
    row(said={**body("a"), "output": [{"type": "message", "id": "m"}]}),
    row(said={**body("a"), "output": [{"id": "m", "text": "x"}]}),
    row(said={**body("a"), "status": 5}),
    array(bulk(KEY), bulk(b"{}")),
    array(*[b"$-1\r\n"] * 4),
    array(b":1\r\n", b":2\r\n", b":3\r\n", b":4\r\n"),
    array(array(array(array(array(b":1\r\n"))))),
]


async def test_a_reply_that_is_right_is_believed() -> None:
    async with fake_redis() as fake:
        store = make_store(fake)
        fake.reply = row()
        assert await store.get("t", "a") == body("a")
        fake.reply = array(row(own=json.dumps(items("q")).encode()))
        assert [item["id"] for item in await store.history("t", "a")] == ["q", "msg_a"]
        await store.close()


@pytest.mark.parametrize("number", range(len(GARBAGE) + len(RECORDS)))
async def test_garbage_is_a_miss(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "DEADLINE_S", 0.5)
    reply = [*GARBAGE, *RECORDS][number]
    async with fake_redis() as fake:
        for read in ("get", "input_items", "history", "items", "conversation"):
            store = make_store(fake)
            fake.reply = reply if read not in ("history",) or number < len(GARBAGE) else array(reply)
            if read == "input_items" and b"reprise:response:t:a" in reply:
                continue  # these are right, whatever was answered to them
            with pytest.raises((NotStored, ApiError)) as missed:
                await getattr(store, read)("t", "a")
            # A reply that never ends is no answer.
            assert isinstance(missed.value, NotStored) or missed.value.status == 503
            await store.close()


async def test_garbage_is_never_a_500(engine: FakeEngine, tmp_path) -> None:
    async with fake_redis() as fake:
        cache = {"redis_url": f"redis://127.0.0.1:{fake.port}/0"}
        async with in_process(engine, make_settings(tmp_path, cache=cache)) as app:
            for reply in (b"\x00garbage\r\n", row(said=DEEP), array(row(said=FAR)), b"*-1\r\n", b"$-5\r\n", b"+OK\r\n"):
                fake.reply = reply
                ask = {"model": "test-model", "input": "Hello"}
                assert (await app.http.post("/v1/responses", json=ask)).status_code == 200
                for path in ("responses/a", "responses/a/input_items", "conversations/c", "conversations/c/items"):
                    assert (await app.http.get(f"/v1/{path}")).status_code in (404, 503)
                follow = await app.http.post("/v1/responses", json={**ask, "previous_response_id": "a"})
                assert follow.status_code in (400, 503)
                assert (await app.http.post("/v1/conversations", json={})).status_code in (200, 503)
                assert (await app.http.delete("/v1/responses/a")).status_code in (200, 404, 503)
            assert (await app.http.get("/health")).status_code == 200


async def test_a_reply_is_bounded_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it has come: its length alone would take the memory."""
    from reprise.app.conversations import redis_reply

    monkeypatch.setattr(redis_reply, "MAX_REPLY_BYTES", 10_000)
    async with fake_redis() as fake:
        store = make_store(fake)
        for reply in (b"$20000\r\n", b"*3\r\n" + bulk(bytes(4000)) * 3, b"*1000000\r\n" + b":1\r\n" * 200):
            fake.reply = reply  # no more of it comes, and no more is waited for
            with pytest.raises(NotStored):
                await store.get("t", "a")
        assert store.failures == 3
        await store.close()


async def test_who_fails_three_times_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(redis_store.time, "monotonic", lambda: now)
    async with fake_redis() as fake:
        store = make_store(fake)
        fake.reply = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        for _ in range(3):
            assert store.state == "closed"
            with pytest.raises(ApiError):
                await store.get("t", "a")
        asked = fake.commands
        for _ in range(5):
            with pytest.raises(ApiError) as refused:
                await store.put("t", body("a"), [], None)
            assert refused.value.status == 503
        assert (store.state, fake.commands, store.failures) == ("open", asked, 3)
        now += 10.0
        assert store.state == "half_open"
        fake.reply = row()
        assert await store.get("t", "a") == body("a")
        assert store.state == "closed"
        await store.close()


async def test_records_that_others_wrote_are_misses(redis_server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write records into a real Redis under our names, in place of the books."""
    from redis import Redis

    store = redis_store.RedisStore(url=redis_server.url, max_bytes=1 << 20, ttl_s=DAY_S)
    with Redis.from_url(redis_server.url) as redis:
        for name in ("a", "b"):
            await store.put("t", body(name), items("q"), None)
        redis.copy("reprise:response:t:b", "reprise:response:t:a", replace=True)
        with pytest.raises(NotStored):
            await store.get("t", "a")
        redis.hset("reprise:response:t:b", mapping={"name": "reprise:response:t:b", "previous": "b"})
        with pytest.raises((NotStored, TooLong)):  # a ring
            await store.history("t", "b")
        await store.put("t", body("c"), items("q"), None)
        redis.hset("reprise:response:t:c", "body", bytes(redis_store.MAX_RECORD_BYTES))
        with pytest.raises(NotStored):
            await store.get("t", "c")
        with pytest.raises(TooLong):
            await store.history("t", "c")
        await store.create("t", "v", {}, items("1"))
        redis.rpush("reprise:conversation:t:v:items", DEEP, b"garbage", b"5")
        with pytest.raises(NotStored):
            await store.items("t", "v")
        await store.delete_item("t", "v", "1")
        redis.set("reprise:response:t:b", "a string")
        with pytest.raises(NotStored):
            await store.get("t", "b")
        redis.set("reprise:used:t", "no index")
        with pytest.raises(NotStored):
            await store.get("t", "c")
        with pytest.raises(ApiError):
            await store.put("t", body("d"), [], None)
        assert store.state == "closed", "it is not Redis that fails"
        redis.flushall()
    await store.put("t", body("d"), [], None)
    assert await store.get("t", "d") == body("d")
    await store.close()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=200) | st.text(max_size=50).map(lambda text: json.dumps(text).encode()))
def test_what_is_no_record_is_a_bad_one(data: bytes) -> None:
    for check in (items_of, item_of, lambda data: response_of(data, "a")):
        try:
            check(data)
        except BadRecord:
            continue
        assert check is items_of
        assert json.loads(data) == []


def test_a_redis_that_resets_new_connections_is_away_on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis' client lets the RuntimeError pass that uvloop raises for a write to a connection that is gone."""
    monkeypatch.setattr(redis_store, "MOST_FAILURES", 1 << 30)

    async def asks() -> None:
        async with resetting_server() as port:
            store = redis_store.RedisStore(url=f"redis://127.0.0.1:{port}/0", max_bytes=1 << 20, ttl_s=DAY_S)
            for _ in range(20):
                found = await asyncio.gather(*(store.get("", "resp_1") for _ in range(8)), return_exceptions=True)
                assert all(isinstance(one, ApiError) and one.status == 503 for one in found), found

    uvloop.run(asks())
