import pytest

from app import response_store
from app.response_store import NotStored, ResponseStore, TooLong

DAY_S = 86_400.0


def body(name: str, said: str = "yes", size: int = 0) -> dict:
    return {"id": name, "output": [{"id": f"msg_{name}", "text": said + "x" * size}]}


def items(*names: str) -> list[dict]:
    return [{"id": name, "text": name} for name in names]


@pytest.fixture
async def store(tmp_path):
    store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=1 << 20, ttl_s=DAY_S)
    yield store
    await store.close()


async def test_a_chain_of_responses(store):
    await store.put("t", body("a", "one"), items("q1"), None)
    await store.put("t", body("b", "two"), items("q2", "q3"), "a")
    assert (await store.get("t", "b"))["output"][0]["text"] == "two"
    assert [item["id"] for item in await store.history("t", "b")] == ["q1", "msg_a", "q2", "q3", "msg_b"]
    assert [item["id"] for item in await store.input_items("t", "b")] == ["q1", "msg_a", "q2", "q3"]
    await store.put("t", body("b", "three"), items("q2"), "a")
    assert (await store.get("t", "b"))["output"][0]["text"] == "three"
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
    monkeypatch.setattr(response_store, "MAX_ITEMS", 3)
    await store.create("t", "c", {}, items("1", "2"))
    with pytest.raises(TooLong):
        await store.append("t", "c", items("3", "4"))
    assert len(await store.items("t", "c")) == 2
    await store.put("t", body("a"), items("1"), None)
    await store.put("t", body("b"), items("2"), "a")
    with pytest.raises(TooLong):
        await store.history("t", "b")


async def test_a_damaged_file_is_one_in_which_nothing_is_found(tmp_path):
    path = tmp_path / "r.sqlite3"
    path.write_bytes(b"no database" * 1000)
    store = ResponseStore(path=path, max_bytes=1 << 20, ttl_s=DAY_S)
    with pytest.raises(NotStored):
        await store.get("t", "a")
    await store.put("t", body("a"), [], None)
    assert await store.get("t", "a") == body("a")
    await store.close()
