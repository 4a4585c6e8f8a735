"""Tests of an engine shared out among processes: its texts, its tiers, and its end with any of them."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from reprise.engine.process.client import EngineClient, EngineLost, EngineState
from tests.engine.driver import Driver, config
from tests.engine.models import family_model
from tests.engine.scripted_engine import submit

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("tp_engine.py")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # processes that each load torch and a model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "mistral"):
        family_model(family).save_pretrained(directory / family)
    return directory


def run(model: Path, asks: Sequence[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    """Answers of an engine that starts, is asked, and leaves in order."""
    (answers,) = told(model, asks, **changes)["answers"]
    return answers  # type: ignore[no-any-return]


def told(model: Path, *engines: Sequence[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return what a process says of engines that start one after the other, and of what each is asked."""
    order = {"model": str(model), "engines": engines, "changes": changes}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(order),
        env={**os.environ, "PYTHONPATH": str(ROOT), "USE_HUB_KERNELS": "NO"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def recomputed(model: Path, asks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The texts of one process that reuses nothing."""
    driver = Driver(model, cache_mode="recompute", hbm_tokens=160, max_context=128)
    answers = [
        driver.ask(str(number), ask["prompt"], max_tokens=ask["max_tokens"], ignore_eos=True).token_ids
        for number, ask in enumerate(asks)
    ]
    driver.close()
    return answers


def opening(conversation: int) -> list[int]:
    chance = random.Random(conversation)
    return [chance.randrange(3, 190) for _ in range(70)]


def ask(conversation: int, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
    return {"prompt": prompt, "session": f"s{conversation}", "max_tokens": max_tokens}


FIRST = [ask(conversation, opening(conversation)) for conversation in range(3)]


def next_turns(answers: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Return what is asked after the first turns and their answers."""
    return [
        ask(number, [*asked["prompt"], *answer, 7, 11, 13])
        for number, (asked, answer) in enumerate(zip(FIRST, answers, strict=True))
    ]


def history_of(asked: dict[str, Any]) -> int:
    """Tokens of the turn before: its last one was drawn, not computed."""
    return len(asked["prompt"]) - 3 - 1


def texts(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["token_ids"] for answer in answers]


def loaded(answers: Sequence[dict[str, Any]]) -> int:
    return sum(answer["hbm"] + answer["dram"] + answer["disk"] for answer in answers)


def tiers(directory: Path, **changes: Any) -> dict[str, Any]:
    """HBM for one of these conversations, and room for all below it."""
    return {
        "cache_mode": "attentionstore",
        "hbm_tokens": 160,
        "max_context": 128,
        "dram_bytes": 1 << 20,
        "disk_bytes": 1 << 28,
        "disk_dir": str(directory),
        **changes,
    }


@pytest.mark.parametrize(
    ("family", "new_process"),
    [pytest.param("llama", False, marks=pytest.mark.always), ("llama", True), ("qwen2", False), ("mistral", False)],
)
def test_two_ranks_answer_as_one_also_after_a_restart(
    family: str, new_process: bool, models: Path, tmp_path: Path
) -> None:
    """new_process: the first rank is started anew too, which costs six seconds."""
    expected = recomputed(models / family, FIRST)
    # Twice each: off the disk after the restart, and out of DRAM when the others have displaced it from HBM.
    again = next_turns(expected) * 2
    settings = tiers(tmp_path, tensor_parallel=2)
    if new_process:
        first, got = run(models / family, FIRST, **settings), run(models / family, again, **settings)
    else:
        first, got = told(models / family, FIRST, again, **settings)["answers"]
    assert texts(first) == expected
    assert (tmp_path / "kv").is_dir()
    assert (tmp_path / "rank1" / "kv").is_dir()
    assert texts(got) == recomputed(models / family, again)
    history_tokens = sum(history_of(asked) for asked in again[:3])
    assert sum(answer["disk"] for answer in got[:3]) >= 0.95 * history_tokens
    assert loaded(got[3:]) >= 0.95 * history_tokens
    assert sum(answer["dram"] for answer in got[3:])


def test_what_one_rank_has_lost_is_lost(models: Path, tmp_path: Path) -> None:
    answers = texts(run(models / "llama", FIRST, **tiers(tmp_path, tensor_parallel=2)))
    extents = {name: sorted((tmp_path / name).glob("kv/*/??/*.kv")) for name in ("", "rank1")}
    assert len(extents[""]) == len(extents["rank1"]) == 3
    assert [path.name for path in sorted(extents[""], key=lambda p: p.name)] == [
        path.name for path in sorted(extents["rank1"], key=lambda p: p.name)
    ]
    oldest_first = sorted(extents["rank1"], key=lambda path: path.name)
    oldest_first[0].unlink()
    damaged = bytearray(oldest_first[1].read_bytes())
    damaged[-100] ^= 1
    oldest_first[1].write_bytes(damaged)
    again = next_turns(answers)
    got = run(models / "llama", again, **tiers(tmp_path, tensor_parallel=2))
    assert texts(got) == recomputed(models / "llama", again)
    assert got[0]["disk"] == 0
    assert got[1]["disk"] < history_of(again[1])
    assert got[2]["disk"] == history_of(again[2])
    assert not (tmp_path / "kv" / oldest_first[0].parent.parent.name / oldest_first[0].name).exists()


def test_one_rank_is_no_rank(models: Path) -> None:
    alone = told(models / "llama", [ask(0, opening(0))], tensor_parallel=1)
    assert alone["processes"] == 0
    assert not alone["is_connected"]
    assert not alone["knows_ranks"]


def test_heads_that_cannot_be_shared_out_are_refused(models: Path) -> None:
    order = {"model": str(models / "llama"), "engines": [[]], "changes": {"tensor_parallel": 3}}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(order),
        env={**os.environ, "PYTHONPATH": str(ROOT), "USE_HUB_KERNELS": "NO"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode
    assert "model.tensor_parallel is 3, which does not divide 4 attention heads" in done.stderr


async def test_the_engine_starts_anew_as_a_whole_when_a_rank_is_killed(models: Path, tmp_path: Path) -> None:
    said: list[str] = []
    client = EngineClient(
        config=config(models / "llama", **tiers(tmp_path, tensor_parallel=2)),
        start_timeout_s=200.0,
        hang_timeout_s=60.0,
        echo=said.append,
    )
    await client.start()
    try:
        await asyncio.wait_for(client.wait_ready(), 200)
        assert client.pid is not None
        (rank,) = psutil.Process(client.pid).children()
        before = await answer(client, "before")
        stream = await client.submit(submit("lost", token_ids=tuple(opening(0)), max_tokens=50))
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(EngineLost):
            async for _ in stream:
                pass
        assert client.state is EngineState.RESTARTING
        await asyncio.wait_for(client.wait_ready(), 200)
        assert client.restarts == 1
        assert "the engine ends" in "".join(said)  # the watch says so, or the step that misses its part
        assert await answer(client, "after") == before
        first, others = client.pid, psutil.Process(client.pid).children()
        assert len(others) == 1
    finally:
        await client.stop()
    psutil.wait_procs(others, timeout=20)
    assert not any(process.is_running() for process in others)
    assert not psutil.pid_exists(first)


async def answer(client: EngineClient, request_id: str) -> list[int]:
    stream = await client.submit(submit(request_id, token_ids=tuple(opening(1)), max_tokens=6))
    return [token for output in [output async for output in stream] for token in output.token_ids]
