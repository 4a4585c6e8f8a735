"""Tests /v1/cache on the scripted engine."""

import asyncio

import msgspec
import pytest

from reprise.app.schemas.answers.server import CacheCleared, CacheStatsObject
from reprise.app.schemas.answers.sessions import CacheSessionList
from tests.app.fakes import STATS, FakeEngine, Running, in_process, make_settings, session_info

KEY, ADMIN = "sk-somebody-1", "sk-the-admin-1"
OWNERS = {"t1": ["a", "b"], "t2": ["a"], "t3": ["x", "y", "z"]}


def keep(engine: FakeEngine) -> None:
    for tenant, names in OWNERS.items():
        for name in names:
            engine.kept[tenant, name] = session_info(name, tenant=tenant)


async def test_stats_add_up(running: Running):
    answer = (await running.http.get("/v1/cache/stats")).json()
    CacheStatsObject.model_validate(answer, strict=True)
    assert answer["prompt_tokens"] == {"hbm": 32, "dram": 0, "disk": 0, "redis": 0, "computed": 9}
    assert answer["hit_rate"] == pytest.approx(32 / 41, abs=1e-6)
    assert sum(answer["hit_rates"].values()) == pytest.approx(1, abs=1e-5)
    assert answer["tiers"]["hbm"] == {"used_bytes": 8 * 32 * 512, "capacity_bytes": 128 * 32 * 512}
    assert answer["tiers"]["disk"] == {"used_bytes": 2000, "capacity_bytes": 8000}
    assert (answer["load_failures"], answer["verify_mismatches"]) == ({"checksum": 2}, 1)


async def test_seconds_are_rounded(running: Running):
    third = 1 / 3
    running.engine.stats = msgspec.structs.replace(
        STATS, moved_seconds={"dram_to_hbm": third}, load_seconds=third, load_wait_seconds=third
    )
    answer = (await running.http.get("/v1/cache/stats")).json()
    seconds = [*answer["moved_seconds"].values(), answer["load_seconds"], answer["load_wait_seconds"]]
    assert seconds == [0.333333] * 3


async def test_a_server_that_has_answered_nobody_has_no_hit_rate(running: Running):
    running.engine.stats = msgspec.structs.replace(STATS, prompt_tokens={})
    answer = (await running.http.get("/v1/cache/stats")).json()
    CacheStatsObject.model_validate(answer, strict=True)
    assert answer["hit_rate"] is None
    running.engine.stats = None
    assert (await running.http.get("/v1/cache/stats")).status_code == 503


async def test_everybodys_sessions_are_read_page_by_page(running: Running):
    keep(running.engine)
    seen: list[tuple[str, str]] = []
    page = {"has_more": True, "data": []}
    while page["has_more"]:
        after = page["data"][-1]["cursor"] if page["data"] else ""
        page = (await running.http.get("/v1/cache/sessions", params={"limit": 2, "after": after})).json()
        CacheSessionList.model_validate(page, strict=True)
        seen += [(session["tenant"], session["id"]) for session in page["data"]]
    assert seen == [(tenant, name) for tenant, names in OWNERS.items() for name in names]


async def test_anybodys_session_is_deleted_and_nobody_elses(running: Running):
    keep(running.engine)
    assert (await running.http.delete("/v1/cache/sessions/t1/a")).status_code == 204
    assert ("t1", "a") not in running.engine.kept
    assert ("t2", "a") in running.engine.kept
    for gone in ("t1/a", "t9/a", "t1/%00", "%20/b"):
        assert (await running.http.delete(f"/v1/cache/sessions/{gone}")).status_code == 404
    assert len(running.engine.kept) == 5


async def test_all_kv_leaves_and_what_was_said_stays(running: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("reprise.app.api.reprise.cache.CLEAR_PAGE", 2)
    question = [{"role": "user", "content": "Hi"}]
    said = await running.http.post("/v1/chat/completions", json={"model": "test-model", "messages": question})
    keep(running.engine)
    cleared = await running.http.post("/v1/cache/clear", json={})
    assert cleared.json() == {"object": "cache.cleared", "removed": 6, "running": 0}
    CacheCleared.model_validate(cleared.json(), strict=True)
    assert running.engine.kept == {}
    history = [*question, said.json()["choices"][0]["message"], *question]
    await running.http.post("/v1/chat/completions", json={"model": "test-model", "messages": history})
    first, second = running.engine.submitted
    assert second.session_id == first.session_id  # known by its transcript
    again = (await running.http.post("/v1/cache/clear", json={})).json()
    assert again["removed"] == 0


async def test_deletions_wait_for_the_disk_together(running: Running, monkeypatch: pytest.MonkeyPatch):
    """One after the other, a hundred sessions took as long as a hundred turns of the engine's idle loop."""
    keep(running.engine)
    ask, waiting, most = running.engine.sessions, 0, 0

    async def slow(request, *, timeout_s):
        nonlocal waiting, most
        if request.action == "delete":
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(0.01)
            waiting -= 1
        return await ask(request, timeout_s=timeout_s)

    monkeypatch.setattr(running.engine, "sessions", slow)
    monkeypatch.setattr("reprise.app.api.reprise.cache.CLEAR_AT_ONCE", 4)
    cleared = (await running.http.post("/v1/cache/clear", json={})).json()
    assert (cleared["removed"], most) == (6, 4)


async def test_what_fails_while_clearing_is_told(running: Running, monkeypatch: pytest.MonkeyPatch):
    keep(running.engine)
    ask = running.engine.sessions

    async def failing(request, *, timeout_s):
        reply = await ask(request, timeout_s=timeout_s)
        return msgspec.structs.replace(reply, error_code="unavailable") if request.action == "delete" else reply

    monkeypatch.setattr(running.engine, "sessions", failing)
    assert (await running.http.post("/v1/cache/clear", json={})).status_code == 503


async def test_sessions_that_run_are_counted_and_stay(running: Running, monkeypatch: pytest.MonkeyPatch):
    keep(running.engine)
    ask = running.engine.sessions

    async def busy(request, *, timeout_s):
        if request.action == "delete" and request.tenant == "t3":
            return msgspec.structs.replace(await ask(msgspec.structs.replace(request, action="get"), timeout_s=1),
                                           error_code="busy")  # fmt: skip
        return await ask(request, timeout_s=timeout_s)

    monkeypatch.setattr(running.engine, "sessions", busy)
    cleared = (await running.http.post("/v1/cache/clear", json={})).json()
    assert (cleared["removed"], cleared["running"]) == (3, 3)


async def test_a_page_in_a_browser_cannot_clear(running: Running):
    """It can post without asking, but no JSON."""
    keep(running.engine)
    for headers in ({}, {"content-type": "text/plain"}):
        assert (await running.http.post("/v1/cache/clear", headers=headers, content=b"{}")).status_code == 415
    assert len(running.engine.kept) == 6


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "stats"), ("GET", "sessions"), ("DELETE", "sessions/t1/a"), ("POST", "clear")],
)
async def test_where_there_are_keys_an_admins_alone_opens_it(engine: FakeEngine, tmp_path, method: str, path: str):
    settings = make_settings(tmp_path, server={"api_keys": (KEY,), "admin_keys": (ADMIN,)})
    async with in_process(engine, settings) as running:
        keep(engine)

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            json = {} if method == "POST" else None
            return (await running.http.request(method, f"/v1/cache/{path}", headers=headers, json=json)).status_code

        assert [await ask(""), await ask("sk-nobodys"), await ask(KEY)] == [401, 401, 403]
        assert len(engine.kept) == 6
        assert await ask(ADMIN) in (200, 204)
