"""Tests the live view's event stream, read from a real socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from reprise.app.state_disk import StateDisk
from reprise.engine.messages import SchedulerState, WaitingInfo
from reprise.engine.process.client import EngineLost
from tests.app.fakes import STATS, FakeEngine, Running, make_settings, on_loopback, session_info, until

KEYS = {"api_keys": ("key-of-the-first", "key-of-the-other"), "admin_keys": ("key-of-the-admin",)}


def waiting(request_id: str, tenant: str) -> WaitingInfo:
    return WaitingInfo(
        request_id=request_id,
        tenant=tenant,
        session_id=f"session-of-{request_id}",
        order={"class": 3.0, "overtaken": 1.0},
        hbm_tokens=32,
        lower_tokens={"disk": 64},
        bytes_to_load=4096,
        missing_tokens=10,
        has_pages=False,
        waiting_s=0.5,
        expected_start_s=None,
    )


def queue(*front: WaitingInfo) -> SchedulerState:
    return SchedulerState(
        policy="car",
        front=list(front),
        preemptions=0,
        fair_preemptions=0,
        loads={},
        step_cost={},
    )


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def watching(running: Running, key: str = "none") -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """(name, data) of one stream's events, as they come."""
    async with running.http.stream("GET", "/v1/events", headers=headers(key)) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")

        async def read() -> AsyncIterator[tuple[str, Any]]:
            name = ""
            async for line in response.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)

        yield read()


async def next_of(stream: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    async with asyncio.timeout(5):
        async for found, data in stream:
            if found == name:
                return data
    raise AssertionError("the stream ended")


async def test_a_page_is_told_what_is_where_and_what_every_answer_cost(server: Running) -> None:
    server.engine.kept["local", "old"] = session_info("old", last_used_s=1.0)
    server.engine.kept["local", "new"] = session_info("new", last_used_s=2.0)
    server.engine.stats = msgspec.structs.replace(STATS, scheduler=queue(waiting("r/0", "local")), waiting=3)
    answer = (await server.chat()).json()
    async with watching(server) as stream:
        (turn,) = await next_of(stream, "turns")
        assert (turn["request_id"], turn["session_id"]) == (answer["id"], answer["x_cache"]["session_id"])
        for field in ("hbm_tokens", "disk_tokens", "computed_tokens", "truncated_tokens"):
            assert turn[field] == answer["x_cache"][field]
        assert turn["ttft_ms"] == answer["timings"]["ttft_ms"]
        assert turn["saved_ms"] == answer["x_cache"]["saved_ms"]
        state = await next_of(stream, "state")
        assert (state["scope"], state["engine"], state["model"]) == ("all", "ready", "test-model")
        page_bytes = 32 * 512
        assert state["tiers"]["hbm"] == {"used_bytes": 8 * page_bytes, "capacity_bytes": 128 * page_bytes}
        assert state["tiers"]["disk"] == {"used_bytes": 2000, "capacity_bytes": 8000}
        assert state["codec"] is None
        assert [session["id"] for session in state["sessions"]] == ["new", "old"]
        assert (state["queue"]["policy"], state["queue"]["waiting"]) == ("car", 3)
        assert state["queue"]["front"][0]["lower_tokens"] == {"disk": 64}
        assert "tenant" not in state["queue"]["front"][0]
        second = (await server.chat("Again", n=2)).json()  # heard of while the stream is open
        (turn,) = await next_of(stream, "turns")  # one, for the choice that paid
        assert turn["request_id"] == second["id"]


async def test_tenants_see_their_own_and_the_admin_all(engine: FakeEngine, tmp_path: Any) -> None:
    async with on_loopback(engine, make_settings(tmp_path, server=KEYS)) as running:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}], "session_id": "mine"}
        await running.http.post("/v1/chat/completions", json=body, headers=headers("key-of-the-first"))
        tenant = engine.submitted[0].tenant
        engine.kept[tenant, "mine"] = session_info("mine")
        engine.stats = msgspec.structs.replace(STATS, scheduler=queue(waiting("mine/0", tenant), waiting("x/0", "x")))
        seen = {}
        for who in ("first", "other", "admin"):
            async with watching(running, f"key-of-the-{who}") as stream:
                if who != "other":
                    assert (await next_of(stream, "turns"))[0]["session_id"] == "mine"
                seen[who] = await next_of(stream, "state")
        assert [seen[who]["scope"] for who in ("first", "other", "admin")] == ["own", "own", "all"]
        for who in ("first", "other"):
            assert seen[who]["tiers"] is seen[who]["moved_bytes"] is seen[who]["running"] is None
        assert "mine" not in json.dumps(seen["other"])
        assert "x/0" not in json.dumps(seen["first"])
        assert [info["request_id"] for info in seen["first"]["queue"]["front"]] == ["mine/0"]
        assert seen["first"]["queue"]["waiting"] == 1
        assert [session["id"] for session in seen["first"]["sessions"]] == ["mine"]
        assert len(seen["admin"]["queue"]["front"]) == 2
        assert (await running.http.get("/v1/events")).status_code == 401


async def test_who_may_watch_is_bounded_and_places_come_back(
    engine: FakeEngine, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("reprise.app.main.MAX_WATCHERS", 8)
    keys = {"api_keys": ("key-of-the-first", "key-of-the-other")}
    async with on_loopback(engine, make_settings(tmp_path, server=keys)) as running:
        live = running.app.state.live
        async with watching(running, "key-of-the-first") as one, watching(running, "key-of-the-first") as two:
            assert await next_of(one, "state")
            assert await next_of(two, "state")
            refused = await running.http.get("/v1/events", headers=headers("key-of-the-first"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            async with watching(running, "key-of-the-other") as stream:
                assert await next_of(stream, "state")
        await until(lambda: live.watchers == 0, timeout_s=5)


async def test_the_engine_is_asked_once_a_period_and_may_be_away(server: Running) -> None:
    server.engine.kept["local", "a"] = session_info("a")
    async with watching(server) as one, watching(server) as two:
        assert await next_of(one, "state")
        assert [session["id"] for session in (await next_of(two, "state"))["sessions"]] == ["a"]
        assert len(server.engine.questions) == 1
        server.engine.session_error, server.engine.state = EngineLost("died"), "restarting"
        state = await next_of(one, "state")
        assert state["engine"] == "restarting"
        assert [session["id"] for session in state["sessions"]] == ["a"]


async def test_a_drain_ends_the_stream(server: Running) -> None:
    async with watching(server) as stream:
        await next_of(stream, "state")
        server.app.state.readiness.draining = True
        async with asyncio.timeout(5):
            assert [name async for name, _ in stream if name == "turns"] == []
    with contextlib.suppress(httpx.HTTPError):
        assert (await server.http.get("/v1/events")).text == ""


async def test_a_page_that_does_not_read_hears_of_the_newest(engine: FakeEngine, tmp_path: Any) -> None:
    from reprise.app.observe.live import MAX_TURNS, Live

    live = Live(engine=engine, places=4, state_disk=StateDisk())
    watcher = live.watch("local", sees_all=True)
    for n in range(MAX_TURNS + 5):
        watcher.hear({"n": n})
    assert [turn["n"] for turn in watcher.take()] == list(range(5, MAX_TURNS + 5))
    assert watcher.take() == []
