import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.errors import ApiError
from reprise.app.tenancy.keyring import KeyLimits
from reprise.app.tenancy.quotas import excess_of, leaving
from reprise.engine.messages import SessionInfo
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, session_info, until

TENANT = "local"


def kept(number: int, *, size: int = 10, **changes: object) -> SessionInfo:
    return session_info(f"s{number}", last_used_s=float(number), bytes={"hbm": size, "disk": size}, **changes)


def names(infos: list[SessionInfo]) -> list[str]:
    return [info.session_id for info in infos]


def test_the_longest_unused_leave_and_the_newest_stays():
    sessions = [kept(number) for number in (3, 1, 4, 2)]
    assert names(leaving(sessions, KeyLimits(sessions=2))) == ["s1", "s2"]
    assert names(leaving(sessions, KeyLimits(cache_bytes=60))) == ["s1"]  # 80 bytes are kept, 20 each
    assert names(leaving(sessions, KeyLimits(cache_bytes=1))) == ["s1", "s2", "s3"]
    assert leaving(sessions, KeyLimits()) == []
    assert leaving([], KeyLimits(sessions=1)) == []


def test_pinned_and_running_ones_stay():
    sessions = [kept(1, pinned=True), kept(2, running=True), kept(3), kept(4)]
    assert names(leaving(sessions, KeyLimits(sessions=1))) == ["s3"]


@given(
    sessions=st.lists(
        st.builds(kept, st.integers(0, 5), size=st.integers(0, 20), pinned=st.booleans(), running=st.booleans()),
        max_size=8,
    ),
    limit=st.integers(0, 5),
    size=st.integers(0, 100),
)
def test_as_many_leave_as_have_to_and_no_more(sessions, limit, size):
    limits = KeyLimits(sessions=limit, cache_bytes=size)
    gone = leaving(sessions, limits)
    rest = [info for info in sessions if not any(info is other for other in gone)]
    assert not any(info.pinned or info.running for info in gone)
    if excess_of(rest, limits):  # nothing more could leave
        newest = max(sessions, key=lambda info: info.last_used_s)
        assert all(info.pinned or info.running or info.last_used_s == newest.last_used_s for info in rest)
    if gone:
        assert excess_of([*rest, gone[-1]], limits)


@pytest.fixture
async def limited(engine: FakeEngine, tmp_path) -> AsyncIterator[Running]:
    async with in_process(engine, make_settings(tmp_path, limits={"key_sessions": 2})) as running:
        running.app.state.quotas._look_s = 0.01
        yield running


async def test_a_new_conversation_displaces_the_oldest(limited: Running):
    for number in range(3):
        limited.engine.kept[TENANT, f"s{number}"] = kept(number)
    limited.engine.kept["other", "s0"] = kept(0)
    assert (await limited.chat(session_id="s2")).status_code == 200
    await until(lambda: len(limited.engine.kept) == 3, timeout_s=5)
    assert sorted(limited.engine.kept) == [(TENANT, "s1"), (TENANT, "s2"), ("other", "s0")]
    assert (await limited.chat()).status_code == 200


async def test_who_pins_too_much_is_told_so_until_it_unpins(limited: Running):
    for number in range(3):
        limited.engine.kept[TENANT, f"s{number}"] = kept(number, pinned=True)
    assert (await limited.chat()).status_code == 200  # nobody had looked
    quotas = limited.app.state.quotas
    await until(lambda: quotas._over, timeout_s=5)
    refused = await limited.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert refused.headers["retry-after"] == "1"
    assert "3 conversations, of at most 2" in refused.json()["error"]["message"]
    limited.engine.kept[TENANT, "s0"] = kept(0)
    assert (await limited.chat()).status_code == 200  # another look, and the one that may leave has left
    assert (TENANT, "s0") not in limited.engine.kept


async def test_an_engine_that_cannot_say_refuses_nobody(limited: Running):
    limited.engine.session_error = "unavailable"
    assert (await limited.chat()).status_code == 200
    await asyncio.sleep(0.05)
    assert (await limited.chat()).status_code == 200


async def test_without_quotas_nobody_looks(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path)) as running:
        assert (await running.chat()).status_code == 200
        await asyncio.sleep(0.02)
        assert engine.questions == []


async def test_many_sessions_are_seen_page_by_page(limited: Running, monkeypatch):
    monkeypatch.setattr("reprise.app.tenancy.quotas.PAGE", 2)
    for number in range(5):
        limited.engine.kept[TENANT, f"s{number}"] = kept(number)
    await limited.chat()
    await until(lambda: len(limited.engine.kept) == 2, timeout_s=5)
    assert sorted(name for _, name in limited.engine.kept) == ["s3", "s4"]


async def test_a_conversation_that_is_running_again_still_counts(limited: Running, monkeypatch):
    """It was to leave, and its deletion is answered 409."""
    delete = limited.app.state.sessions.delete_here

    async def refuse(session_id, *, tenant):
        if session_id == "s0":
            raise ApiError(409, "a request of it runs", code="session_busy")
        await delete(session_id, tenant=tenant)

    monkeypatch.setattr(limited.app.state.sessions, "delete_here", refuse)
    for number in range(3):
        limited.engine.kept[TENANT, f"s{number}"] = kept(number)
    limited.app.state.quotas.changed(TENANT)
    await until(lambda: limited.app.state.quotas._over, timeout_s=5)
    assert limited.app.state.quotas._over[TENANT] == "3 conversations, of at most 2"
