"""Tests app/conversations/unstored.py: no response is lost because its store cannot take it now."""

import asyncio
import logging
from typing import Any

import pytest

from reprise.app import state_disk
from reprise.app.conversations import unstored as unstored_module
from reprise.app.conversations.response_store import NotStored, ResponseStore, TooLong, not_reachable
from reprise.app.conversations.unstored import StoredResponses
from reprise.app.errors import ApiError
from reprise.app.state_disk import StateDisk
from tests.app.conversations.test_response_store import DAY_S, body, items
from tests.app.fakes import until
from tests.app.hanging_files import HangingFiles


class FullDisk(ResponseStore):
    """A store whose file cannot grow while `is_full`."""

    async def set_full(self, is_full: bool) -> None:
        pages = "SELECT page_count FROM pragma_page_count"
        most = self._db.execute(pages).fetchone()[0] if is_full else 1 << 20
        self._db.execute(f"PRAGMA max_page_count = {most}").fetchall()


@pytest.fixture
async def store(tmp_path):
    store = FullDisk(path=tmp_path / "r.sqlite3", max_bytes=8 << 20, ttl_s=DAY_S)
    yield store
    await store.close()


def long(name: str) -> dict:
    return body(name, size=100_000)


async def test_what_a_full_disk_cannot_take_is_there_and_stored_when_there_is_room(store):
    records = StoredResponses(store, ttl_s=DAY_S)
    await records.put("t", body("a"), items("q1"), None)
    await store.set_full(True)
    await records.put("t", long("b"), items("q2"), "a")
    await records.put("t", long("c"), items("q3"), "b")
    assert (await records.get("t", "c"))["id"] == "c"
    assert [item["id"] for item in await records.history("t", "c")] == ["q1", "msg_a", "q2", "msg_b", "q3", "msg_c"]
    assert [item["id"] for item in await records.input_items("t", "c")] == ["q1", "msg_a", "q2", "msg_b", "q3"]
    with pytest.raises(NotStored):
        await records.get("u", "c")
    with pytest.raises(NotStored):
        await store.get("t", "b")
    await store.set_full(False)
    await records.sweep()
    assert [item["id"] for item in await store.history("t", "c")] == ["q1", "msg_a", "q2", "msg_b", "q3", "msg_c"]


async def test_a_response_that_could_not_be_deleted_is_there_as_it_was(store):
    """Else an earlier state of it, which is stored, would be there in its place."""
    records = StoredResponses(store, ttl_s=DAY_S)
    await records.put("t", body("a"), items("q1"), None)
    store._db.execute("PRAGMA query_only = ON")  # every write fails, as on a full disk
    newest = long("a")
    await records.put("t", newest, items("q1"), None)
    with pytest.raises(ApiError):
        await records.delete("t", "a")
    assert await records.get("t", "a") == newest
    store._db.execute("PRAGMA query_only = OFF")
    await records.delete("t", "a")
    await records.store_kept()
    with pytest.raises(NotStored):
        await records.get("t", "a")


async def test_what_was_stored_is_read_on_a_full_disk_and_what_cannot_be_written_is_said(store):
    await store.put("t", body("a"), items("q1"), None)
    await store.create("t", "conv", {}, items("q2"))
    await store.set_full(True)
    assert [item["id"] for item in await store.history("t", "a")] == ["q1", "msg_a"]
    assert [item["id"] for item in await store.items("t", "conv")] == ["q2"]
    with pytest.raises(ApiError) as refused:
        await store.append("t", "conv", [{"id": "q3", "text": "x" * 100_000}])
    assert refused.value.status == 503


async def test_what_is_deleted_or_said_anew_meanwhile_does_not_come_back(store):
    records = StoredResponses(store, ttl_s=DAY_S)
    await store.set_full(True)
    for name in ("a", "b"):
        await records.put("t", long(name), [], None)
    await records.put("t", {**long("b"), "status": "failed"}, [], None)
    await records.delete("t", "a")
    with pytest.raises(NotStored):
        await records.delete("t", "a")
    await store.set_full(False)
    assert await records.store_kept()
    with pytest.raises(NotStored):
        await records.get("t", "a")
    assert (await store.get("t", "b"))["status"] == "failed"


async def test_it_is_bounded_and_who_has_most_loses_its_oldest(store, caplog):
    caplog.set_level(logging.ERROR)
    records = StoredResponses(store, ttl_s=DAY_S, max_bytes=350_000)
    await store.set_full(True)
    for tenant, name in (("u", "a"), ("t", "b"), ("t", "c"), ("t", "d")):
        await records.put(tenant, long(name), [], None)
    with pytest.raises(NotStored):
        await records.get("t", "b")
    for tenant, name in (("u", "a"), ("t", "c"), ("t", "d")):
        assert (await records.get(tenant, name))["id"] == name


async def test_it_is_kept_no_longer_than_a_stored_one(store, monkeypatch):
    records = StoredResponses(store, ttl_s=100.0)
    await store.set_full(True)
    await records.put("t", long("a"), [], None)
    now = unstored_module.time.time()
    monkeypatch.setattr(unstored_module.time, "time", lambda: now + 101.0)
    with pytest.raises(NotStored):
        await records.get("t", "a")


async def test_a_store_that_does_not_answer_loses_nothing_either(store, monkeypatch):
    records = StoredResponses(store, ttl_s=DAY_S)

    async def away(*_: object) -> None:
        raise not_reachable()

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", away)
        await records.put("t", body("a"), [], None)
        assert (await records.get("t", "a"))["id"] == "a"
        assert not await records.store_kept()
    assert await records.store_kept()
    assert (await store.get("t", "a"))["id"] == "a"


async def test_what_two_requests_store_at_once_stays(store):
    records = StoredResponses(store, ttl_s=DAY_S)
    await store.set_full(True)
    for name in ("a", "b"):
        await records.put("t", long(name), [], None)
    await store.set_full(False)
    assert await asyncio.gather(records.store_kept(), records.sweep(), records.put("t", body("c"), [], None))
    assert [(await store.get("t", name))["id"] for name in "abc"] == ["a", "b", "c"]


async def test_what_is_deleted_while_it_is_stored_is_gone(store, monkeypatch):
    records = StoredResponses(store, ttl_s=DAY_S)
    await store.set_full(True)
    await records.put("t", long("a"), [], None)
    await store.set_full(False)
    put = store.put

    async def put_late(*response: Any) -> None:
        await asyncio.sleep(0.05)
        await put(*response)

    monkeypatch.setattr(store, "put", put_late)
    await asyncio.gather(records.store_kept(), records.delete("t", "a"))
    with pytest.raises(NotStored):
        await records.get("t", "a")


async def test_what_never_has_room_keeps_nothing_from_being_stored(store, monkeypatch):
    records = StoredResponses(store, ttl_s=DAY_S)
    await store.set_full(True)
    for name in ("a", "b"):
        await records.put("t", long(name), [], None)
    await store.set_full(False)
    put = store.put

    async def put_short(tenant: str, said: dict, *rest: Any) -> None:
        if said["id"] == "a":
            raise TooLong("a")
        await put(tenant, said, *rest)

    monkeypatch.setattr(store, "put", put_short)
    assert await records.store_kept()
    assert (await store.get("t", "b"))["id"] == "b"


async def test_an_earlier_state_that_is_written_late_never_stands_in_place_of_a_later_one(tmp_path, monkeypatch):
    monkeypatch.setattr(state_disk, "FIRST_PAUSE_S", 0.01)
    files, disk = HangingFiles(monkeypatch), StateDisk(deadline_s=10.0)
    store = ResponseStore(path=tmp_path / "r.sqlite3", max_bytes=8 << 20, ttl_s=DAY_S, disk=disk)
    records = StoredResponses(store, ttl_s=DAY_S)
    await records.put("t", body("other"), [], None)
    files.hang()
    disk.deadline_s = 0.1
    await records.put("t", {**body("a"), "status": "in_progress"}, [], None)  # given up, and done late
    await records.put("t", body("a"), [], None)
    files.mend()
    await until(lambda: not disk.is_away)
    disk.deadline_s = 10.0
    assert (await store.get("t", "a"))["status"] == "in_progress", "it was done late"
    assert (await records.get("t", "a"))["status"] == "completed"
    assert await records.store_kept()
    assert (await store.get("t", "a"))["status"] == "completed"
    await store.close()
