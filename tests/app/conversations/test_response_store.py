import asyncio
from collections.abc import Iterator

import pytest

from reprise.app.conversations import redis_store, response_store
from reprise.app.conversations.redis_store import RedisStore, RedisStoreUnavailable
from reprise.app.conversations.response_store import NotStored, ResponseStore, TooLong
from reprise.app.errors import ApiError
from tests.app.fakes import FakeEngine, in_process, make_settings
from tests.redis_servers import RedisServer
from tests.redis_servers import redis_server as run_redis

DAY_S = 86_400.0


@pytest.fixture
def redis_server(tmp_path_factory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("r")) as server:
        yield server


def message(name: str, text: str, role: str = "user") -> dict:
    return {"id": name, "type": "message", "role": role, "content": [{"text": text}]}


def body(name: str, said: str = "yes", size: int = 0) -> dict:
    output = [message(f"msg_{name}", said + "x" * size, "assistant")]
    return {"id": name, "status": "completed", "background": False, "output": output}


def items(*names: str) -> list[dict]:
    return [message(name, name) for name in names]


@pytest.fixture(params=["file", "redis"])
async def store(request, tmp_path):
    if request.param == "file":
        store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=1 << 20, ttl_s=DAY_S)
    else:
        store = RedisStore(url=request.getfixturevalue("redis_server").url, max_bytes=1 << 20, ttl_s=DAY_S)
    yield store
    await store.close()


async def test_a_chain_of_responses(store):
    await store.put("t", body("a", "one"), items("q1"), None)
    await store.put("t", body("b", "two"), items("q2", "q3"), "a")
    assert (await store.get("t", "b"))["output"][0]["content"][0]["text"] == "two"
    assert [item["id"] for item in await store.history("t", "b")] == ["q1", "msg_a", "q2", "q3", "msg_b"]
    assert [item["id"] for item in await store.input_items("t", "b")] == ["q1", "msg_a", "q2", "q3"]
    await store.put("t", body("b", "three"), items("q2"), "a")
    assert (await store.get("t", "b"))["output"][0]["content"][0]["text"] == "three"
    await store.delete("t", "a")
    for call in (store.get("t", "a"), store.delete("t", "a"), store.history("t", "b")):
        with pytest.raises(NotStored):
            await call
    assert await store.get("t", "b")


async def test_conversations_and_their_items(store):
    made = await store.create("t", "c", {"k": "v"}, items("1"))
    assert (await store.conversation("t", "c")) == made
    await store.append("t", "c", items("2", "3"))
    assert [item["id"] for item in await store.items("t", "c")] == ["1", "2", "3"]
    await store.delete_item("t", "c", "2")
    with pytest.raises(NotStored):
        await store.delete_item("t", "c", "2")
    assert (await store.update("t", "c", {"x": "y"})).metadata == {"x": "y"}
    assert [item["id"] for item in await store.items("t", "c")] == ["1", "3"]
    await store.forget("t", "c")
    for call in (store.conversation("t", "c"), store.items("t", "c"), store.append("t", "c", items("4"))):
        with pytest.raises(NotStored):
            await call


async def test_tenants_do_not_see_each_other(store):
    await store.put("t", body("a"), [], None)
    await store.create("t", "c", {}, items("1"))
    calls = (
        store.get("u", "a"), store.delete("u", "a"), store.history("u", "a"), store.input_items("u", "a"),
        store.conversation("u", "c"), store.items("u", "c"), store.append("u", "c", []), store.forget("u", "c"),
        store.update("u", "c", {}), store.delete_item("u", "c", "1"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(NotStored):
            await call
    assert await store.get("t", "a")
    assert await store.items("t", "c")


async def test_it_survives_a_restart_and_is_private(tmp_path):
    store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=1 << 20, ttl_s=DAY_S)
    await store.put("t", body("a"), [], None)
    await store.close()
    assert (tmp_path / "r.sqlite3").stat().st_mode & 0o777 == 0o600
    again = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=1 << 20, ttl_s=DAY_S)
    assert await again.get("t", "a") == body("a")
    await again.close()


async def test_what_was_used_longest_ago_makes_room(tmp_path):
    store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=400_000, ttl_s=DAY_S)
    await store.create("t", "c", {}, items("1"))
    await store.put("t", body("first"), [], None)
    for n in range(60):
        await store.put("t", body(f"r{n}", size=20_000), [], None)
        await store.conversation("t", "c")  # used all the time, so it stays
    assert (tmp_path / "r.sqlite3").stat().st_size <= 500_000
    assert await store.get("t", "r59")
    assert await store.items("t", "c")
    with pytest.raises(NotStored):
        await store.get("t", "first")
    await store.put("t", body("huge", size=1_000_000), [], None)  # no room even alone
    assert (tmp_path / "r.sqlite3").stat().st_size <= 500_000
    await store.close()


async def test_who_keeps_much_pushes_out_its_own(store):
    await store.put("small", body("first", size=1000), items("q"), None)
    await store.create("small", "c", {"k": "v"}, items("1", "2"))
    for n in range(80):
        await store.put("large", body(f"r{n}", size=30_000), [], None)  # more than twice what all may have
    await store.create("large", "d", {}, [message(str(n), "x" * 30_000) for n in range(10)])
    for n in range(40):
        await store.put("large", body(f"s{n}", size=30_000), [], None)
    assert await store.get("small", "first")
    assert [item["id"] for item in await store.items("small", "c")] == ["1", "2"]
    assert await store.get("large", "s39")
    with pytest.raises(NotStored):
        await store.get("large", "r0")


async def test_what_nobody_uses_is_forgotten(tmp_path, monkeypatch):
    store = ResponseStore(path=None, max_bytes=1 << 20, ttl_s=DAY_S)
    await store.put("t", body("a"), [], None)
    await store.create("t", "c", {}, items("1"))
    now = response_store.time.time()
    monkeypatch.setattr(response_store.time, "time", lambda: now + 2 * DAY_S)
    for call in (store.get("t", "a"), store.conversation("t", "c")):
        with pytest.raises(NotStored):
            await call
    for _ in range(3):
        await store.sweep()
    count = store._db.execute("SELECT (SELECT count(*) FROM responses) + (SELECT count(*) FROM items)").fetchone()
    assert count == (0,)
    await store.close()


async def test_a_conversation_and_a_chain_have_an_end(store, monkeypatch):
    for module in (response_store, redis_store):
        monkeypatch.setattr(module, "MAX_ITEMS", 3)
    await store.create("t", "c", {}, items("1", "2"))
    with pytest.raises(TooLong):
        await store.append("t", "c", items("3", "4"))
    assert len(await store.items("t", "c")) == 2
    await store.put("t", body("a"), items("1"), None)
    await store.put("t", body("b"), items("2"), "a")
    with pytest.raises(TooLong):
        await store.history("t", "b")


async def test_items_that_have_no_room_even_alone_evict_nothing(store):
    await store.put("t", body("a"), [], None)
    await store.create("t", "c", {}, items("1"))
    large = [message(str(n), "x" * 300_000) for n in range(2, 6)]
    for call in (store.append("t", "c", large), store.create("t", "d", {}, large)):
        with pytest.raises(TooLong):
            await call
    assert await store.get("t", "a")
    assert [item["id"] for item in await store.items("t", "c")] == ["1"]
    with pytest.raises(NotStored):
        await store.conversation("t", "d")


async def test_a_conversation_in_a_file_does_not_outgrow_it(tmp_path):
    store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=400_000, ttl_s=DAY_S)
    await store.put("t", body("a"), [], None)
    await store.create("t", "c", {}, [])
    for n in range(3):
        await store.append("t", "c", [message(str(n), "x" * 100_000)])
    with pytest.raises(TooLong):
        await store.append("t", "c", [message("3", "x" * 100_000)])
    assert len(await store.items("t", "c")) == 3
    assert await store.get("t", "a")
    await store.close()


async def test_a_damaged_file_is_one_in_which_nothing_is_found(tmp_path):
    path = tmp_path / "r.sqlite3"
    path.write_bytes(b"no database" * 1000)
    store = ResponseStore(path=path, max_bytes=1 << 20, ttl_s=DAY_S)
    with pytest.raises(NotStored):
        await store.get("t", "a")
    await store.put("t", body("a"), [], None)
    assert await store.get("t", "a") == body("a")
    await store.close()


async def test_what_redis_holds_is_bounded_and_counted(redis_server):
    from redis import Redis

    store = RedisStore(url=redis_server.url, max_bytes=100_000, ttl_s=DAY_S)
    await store.create("t", "c", {"k": "v"}, items("1"))
    await store.put("t", body("first"), [], None)
    for n in range(12):
        await store.put("t", body(f"r{n}", size=20_000), items("q"), None)
        await store.append("t", "c", items(f"i{n}"))  # used all the time, so it stays
    assert await store.get("t", "r11")
    assert len(await store.items("t", "c")) == 13
    with pytest.raises(NotStored):
        await store.get("t", "first")
    await store.update("t", "c", {"k": "longer than before"})
    await store.delete_item("t", "c", "i3")
    with Redis.from_url(redis_server.url) as redis:
        total = int(redis.hget("reprise:held", "t"))
        assert 60_000 < total <= 100_000
        assert total == sum(map(int, redis.hvals("reprise:sizes")))
        held = 0
        for key in redis.zrange("reprise:used:t", 0, -1):
            held += len(key) + sum(len(name) + len(value) for name, value in redis.hgetall(key).items())
            held += sum(map(len, redis.lrange(key + b":items", 0, -1)))
        assert total == held  # equal to the byte
        assert len(redis.keys("*")) == 3 + 1 + redis.zcard("reprise:used:t")
        for n in range(12):
            try:
                await store.delete("t", f"r{n}")
            except NotStored:
                assert n < 8
        await store.forget("t", "c")
        assert redis.keys("*") == []
    await store.close()


async def test_what_nobody_uses_leaves_redis(redis_server, monkeypatch):
    from redis import Redis

    store = RedisStore(url=redis_server.url, max_bytes=1 << 20, ttl_s=DAY_S)
    await store.put("t", body("a"), [], None)
    await store.create("t", "c", {}, items("1"))
    now = redis_store.time.time()
    monkeypatch.setattr(redis_store.time, "time", lambda: now + 2 * DAY_S)
    for call in (store.get("t", "a"), store.conversation("t", "c")):
        with pytest.raises(NotStored):
            await call
    await store.sweep()
    with Redis.from_url(redis_server.url) as redis:
        assert redis.keys("*") == []
    await store.close()


async def test_two_servers_share_what_redis_holds_and_answer_while_it_is_away(
    engine: FakeEngine, redis_server, tmp_path
):
    ask = {"model": "test-model", "input": "Hello"}
    cache = {"redis_url": redis_server.url}
    other_engine = FakeEngine(directory=engine.directory)
    async with (
        in_process(engine, make_settings(tmp_path / "one", cache=cache)) as one,
        in_process(other_engine, make_settings(tmp_path / "two", cache=cache)) as two,
    ):
        first = (await one.http.post("/v1/responses", json=ask)).json()
        second = await two.http.post("/v1/responses", json={**ask, "previous_response_id": first["id"]})
        assert second.status_code == 200
        assert len(other_engine.submitted[0].token_ids) > len(engine.submitted[0].token_ids)
        assert (await two.http.get(f"/v1/responses/{first['id']}")).json() == first
        redis_server.stop()
        assert (await one.http.post("/v1/responses", json=ask)).status_code == 200  # said, and not remembered
        away = await one.http.get(f"/v1/responses/{first['id']}")
        assert (away.status_code, away.json()["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in away.headers
        refused = await one.http.post("/v1/responses", json={**ask, "previous_response_id": first["id"]})
        assert refused.status_code == 503
        assert (await one.http.get("/health")).json() == {
            "status": "ok",
            "engine": "ready",
            "disk": "used",
            "redis": "open",
        }
        assert 'reprise_redis_breaker{state="open"} 1.0' in (await one.http.get("/metrics")).text
        redis_server.start()
        await asyncio.sleep(redis_store.PAUSE_S)
        assert (await one.http.get("/health")).json()["redis"] == "half_open"
        third = (await one.http.post("/v1/responses", json=ask)).json()
        assert (await two.http.get(f"/v1/responses/{third['id']}")).status_code == 200
        assert (await one.http.get("/health")).json()["redis"] == "closed"


async def test_a_redis_that_says_nothing_is_not_waited_for(redis_server, monkeypatch):
    from redis import Redis

    store = RedisStore(url=redis_server.url, max_bytes=1 << 20, ttl_s=DAY_S)
    await store.put("t", body("a"), [], None)
    monkeypatch.setattr(redis_store, "DEADLINE_S", 0.05)
    with Redis.from_url(redis_server.url) as redis:
        redis.client_pause(300)
        with pytest.raises(ApiError) as refused:
            await store.get("t", "a")
    assert refused.value.status == 503
    monkeypatch.setattr(redis_store, "DEADLINE_S", 5.0)
    assert await store.get("t", "a") == body("a")  # as it would have been
    await store.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:notaport", "redis://[::1"])
def test_an_address_that_is_none_is_refused_at_the_start(url):
    pytest.importorskip("redis")
    with pytest.raises(RedisStoreUnavailable, match=r"cache\.redis_url"):
        RedisStore(url=url, max_bytes=1, ttl_s=1.0)


async def test_what_is_deleted_is_in_no_file_any_more(tmp_path):
    store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=1 << 20, ttl_s=DAY_S)
    await store.put("t", body("a", "quokka zebra"), items("quokka secret"), None)
    assert any(b"quokka" in path.read_bytes() for path in tmp_path.iterdir())
    await store.delete("t", "a")
    assert not any(b"quokka" in path.read_bytes() for path in tmp_path.iterdir())
    await store.close()
