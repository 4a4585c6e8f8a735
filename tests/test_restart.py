"""Tests that conversations outlive their server: `reprise serve` is stopped or killed, and started again on its
directory."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.harness.servers import ServerFailed, ServerProcess, serve
from benchmarks.speed.restart import LEAST, Return, Talk, lose_index

pytestmark = pytest.mark.servers

SETTINGS: dict[str, str | int | float] = {"model.dtype": "float32", "cache.hbm_tokens": 2048, "engine.threads": 1}


async def two_turns(server: ServerProcess, talks: list[Talk]) -> None:
    for talk in [*talks, *talks]:
        await talk.turn(server)
    await asyncio.sleep(1.0)


@pytest.mark.always
@pytest.mark.timeout(300)  # four servers start
def test_conversations_survive_a_stop_a_crash_and_the_loss_of_the_index(tmp_path: Path) -> None:
    """One directory, three servers in a row; every one brings back what the one before has said."""
    own = {**SETTINGS, "cache.disk_dir": str(tmp_path)}
    talks = [Talk(session_id=f"s{n}", first_words=560, max_tokens=48, seed=f"{n}") for n in range(2)]

    async def returns(server: ServerProcess, how: str) -> list[Return]:
        return [await talk.return_(server, reference, how, 0) for talk in talks]

    with serve("restart-reference", {**SETTINGS, "cache.mode": "recompute"}) as reference:
        with serve("restart-first", own) as server:
            asyncio.run(two_turns(server, talks))
        with serve("restart-second", own) as server:
            found = asyncio.run(returns(server, "stop"))
            asyncio.run(asyncio.sleep(1.0))
            server.kill()
        lose_index(tmp_path)
        with serve("restart-third", own) as server:
            found += asyncio.run(returns(server, "index"))
    for one in found:
        assert one.history_tokens >= 640
        # Found, but computed sooner than a busy machine loads.
        late_tokens = sum(one.miss_reasons.get(why, 0) for why in ("load_late", "cheaper_to_recompute"))
        assert late_tokens <= 32, one
        assert one.cached_tokens + late_tokens >= LEAST[one.how] * one.history_tokens, one
        assert one.disk_tokens == one.cached_tokens
        assert not one.differs, one


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    own = {**SETTINGS, "cache.disk_dir": str(tmp_path)}
    with serve("first", own) as server:
        with pytest.raises(ServerFailed, match="ended with status 1") as failure, serve("second", own):
            pass
        assert f"in use by a running server (pid {server.pid})" in str(failure.value)
        assert asyncio.run(Talk(session_id="s", first_words=5, max_tokens=2, seed="s").turn(server)).text
