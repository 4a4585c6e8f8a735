import asyncio
import itertools
import math
from pathlib import Path

import msgspec
import pytest

from reprise.app.observe import live as live_module
from reprise.app.observe.live import Live, Watcher, events
from reprise.app.state_disk import StateDisk
from tests.app.fakes import STATS, FakeEngine, Script, in_process, make_settings, session_info, until


@pytest.mark.parametrize("steps", range(5))
async def test_who_leaves_as_news_come_is_gone(steps: int):
    watcher = Watcher("local", sees_all=True, on_close=lambda _: None)
    waiting = asyncio.create_task(watcher.wait(10.0))
    await asyncio.sleep(0)
    watcher.hear({})
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_where_nothing_happens_the_engine_is_not_asked_and_the_page_hardly_told(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Seconds of a hundredth."""
    for name, seconds in (("PERIOD_S", 0.01), ("LINGER_S", 0.05), ("IDLE_S", 100.0)):
        monkeypatch.setattr(live_module, name, seconds)
    await engine.start()
    await engine.wait_ready()
    engine.kept["local", "a"] = session_info("a")
    live = Live(engine=engine, places=4, state_disk=StateDisk())
    watcher = live.watch("local", sees_all=True)
    looks = itertools.count()
    most = 0

    def is_open() -> bool:
        return next(looks) < most

    async def states(count: int) -> list[dict]:
        nonlocal most, looks
        looks, most = itertools.count(), count
        return [data async for name, data in events(live, watcher, is_open=is_open) if name == "state"]

    told = await states(30)
    assert 1 < len(told) < 15  # for a while after what it saw first
    assert len(engine.questions) == 1
    engine.stats = msgspec.structs.replace(STATS, steps=STATS.steps + 1)  # a heartbeat that says something new
    engine.kept["local", "b"] = session_info("b", last_used_s=2000.0)
    told = await states(30)
    assert len(engine.questions) == 2
    assert [session["id"] for session in told[-1]["sessions"]] == ["b", "a"]
    engine.stats = msgspec.structs.replace(STATS, steps=STATS.steps + 1)  # the same once more
    await states(10)
    assert len(engine.questions) == 2


async def test_a_session_is_shown_while_its_first_prompt_is_read(engine: FakeEngine, tmp_path: Path):
    """The engine tells of a session when the first step is over, and nothing during a step."""
    engine.script = Script(start_s=3600.0)
    async with in_process(engine, make_settings(tmp_path)) as running:
        live = running.app.state.live
        watcher = live.watch("local", sees_all=True)
        other = live.watch("another", sees_all=False)
        asked = asyncio.create_task(running.chat(session_id="s"))
        await until(lambda: bool(engine.submitted))
        await until(lambda: bool(live._turns_now))
        (shown,) = (await live.state(watcher))["sessions"]
        assert (shown["id"], shown["running"], shown["blocks"]) == ("s", True, {})
        assert shown["tokens"] == len(engine.submitted[0].token_ids)
        assert (await live.state(other))["sessions"] == []
        engine.kept["local", "s"] = session_info("s")
        (shown,) = (await live.state(running.app.state.live.watch("local", sees_all=True)))["sessions"]
        assert shown["running"]
        asked.cancel()
        await until(lambda: all(now.ended_s < math.inf for now in live._turns_now.values()))
        (shown,) = (await live.state(watcher))["sessions"]
        assert not shown["running"]


async def test_a_session_that_has_just_ended_stays_until_the_engine_is_asked_again(engine: FakeEngine, tmp_path: Path):
    async with in_process(engine, make_settings(tmp_path)) as running:
        live = running.app.state.live
        watcher = live.watch("local", sees_all=True)
        await live.state(watcher)  # the engine is asked, and not again for a second
        await running.chat(session_id="s")
        for now in live._turns_now.values():
            assert now.ended_s < math.inf
        assert [session["id"] for session in (await live.state(watcher))["sessions"]] == ["s"]
        live._latest_sessions.clear()
        assert (await live.state(watcher))["sessions"] == [], "the engine does not know it"


async def test_turns_that_nobody_watches_are_not_kept(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live_module, "KEPT_S", 0.0)
    async with in_process(engine, make_settings(tmp_path)) as running:
        for number in range(4):
            await running.chat(session_id=f"s{number}")
        assert len(running.app.state.live._turns_now) == 1, "the last one, until another ends"
