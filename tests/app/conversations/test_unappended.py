"""Tests app/conversations/unappended.py: what a turn adds to a conversation is not lost because its store cannot take
it now, stands in order, and is stored once."""

import logging

import pytest

from reprise.app.conversations.response_store import NotStored, not_reachable
from reprise.app.conversations.unappended import StoredItems
from reprise.app.errors import ApiError
from tests.app.conversations.test_response_store import DAY_S, items
from tests.app.conversations.test_unstored import FullDisk


@pytest.fixture
async def store(tmp_path):
    store = FullDisk(path=tmp_path / "r.sqlite3", max_bytes=8 << 20, ttl_s=DAY_S)
    await store.create("t", "conv", {}, items("q1"))
    yield store
    await store.close()


def long(name: str) -> list[dict]:
    return [{**item, "content": [{"type": "input_text", "text": "x" * 100_000}]} for item in items(name)]


async def names(kept, conversation: str = "conv") -> list[str]:
    return [item["id"] for item in await kept.items("t", conversation)]


async def test_what_a_full_disk_cannot_take_is_there_and_stored_in_order_when_there_is_room(store):
    kept = StoredItems(store)
    await store.set_full(True)
    await kept.append_turn("t", "conv", long("q2"))
    await kept.append_turn("t", "conv", items("q3"))  # it would have room, but comes after what has none
    assert await names(kept) == ["q1", "q2", "q3"]
    assert await names(store) == ["q1"]
    for refused in (kept.append("t", "conv", items("q4")), kept.delete_item("t", "conv", "q2")):
        with pytest.raises(ApiError) as told:
            await refused
        assert told.value.status == 503
    await store.set_full(False)
    await kept.append("t", "conv", items("q4"))
    assert await names(store) == await names(kept) == ["q1", "q2", "q3", "q4"]


async def test_what_a_store_took_without_an_answer_is_stored_once(store, monkeypatch):
    kept, real = StoredItems(store), store.append

    async def silent(tenant, conversation, added) -> None:
        await real(tenant, conversation, added)
        raise not_reachable()

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", silent)
        await kept.append_turn("t", "conv", items("q2"))
        assert await names(kept) == ["q1", "q2"]
    await kept.append_turn("t", "conv", items("q3"))
    assert await names(store) == ["q1", "q2", "q3"]


async def test_it_is_bounded_and_who_has_most_loses_what_waits_longest(store, caplog):
    kept = StoredItems(store, max_bytes=250_000)
    for name in ("second", "third"):
        await store.create("t", name, {}, [])
    await store.create("u", "other", {}, [])
    await store.set_full(True)
    with caplog.at_level(logging.WARNING):
        await kept.append_turn("u", "other", items("o1"))
        for name in ("conv", "second", "third"):
            await kept.append_turn("t", name, long(f"of_{name}"))
    assert [await names(kept, name) for name in ("conv", "second", "third")] == [["q1"], ["of_second"], ["of_third"]]
    assert [item["id"] for item in await kept.items("u", "other")] == ["o1"]
    assert caplog.text.count("is lost") == 1


async def test_what_is_stored_while_a_conversation_is_read_is_in_it(store, monkeypatch):
    kept, real = StoredItems(store), store.items
    await store.set_full(True)
    await kept.append_turn("t", "conv", long("q2"))
    await store.set_full(False)

    async def slow(tenant, conversation) -> list[dict]:
        found = await real(tenant, conversation)
        monkeypatch.undo()
        await kept.store_kept()
        return found

    monkeypatch.setattr(store, "items", slow)
    assert await names(kept) == ["q1", "q2"]
    assert await names(store) == ["q1", "q2"]


async def test_what_is_kept_goes_with_its_conversation(store):
    kept = StoredItems(store)
    await store.set_full(True)
    await kept.append_turn("t", "conv", long("q2"))
    await store.set_full(False)
    await kept.forget("t", "conv")
    await kept.store_kept()
    with pytest.raises(NotStored):
        await kept.items("t", "conv")
    with pytest.raises(NotStored):
        await kept.append_turn("u", "conv", items("q3"))
