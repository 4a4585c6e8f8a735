"""Tests that a step which only decodes asks nobody in vain: who reads the way of a token reads these files."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.engine.driver import Driver

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "model" / "bundled"
PROMPT = list(range(100, 170))
ASKED = {
    "cache/manager.py",
    "cache/rates.py",
    "cache/requests/lifecycle.py",
    "cache/transfer/device_streams.py",
    "cache/transfer/save_stream.py",
    "cache/transfer/transfer.py",
    "scheduler/budgets/budget.py",
    "scheduler/running_batch.py",
    "scheduler/scheduler.py",
    "scheduler/sequence.py",
}


def entered(call: Callable[[], Any]) -> set[str]:
    """Files of `cache` and `scheduler` that this thread enters meanwhile."""
    found = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(path.relative_to(ROOT).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {file for file in found if file.startswith(("cache/", "scheduler/"))}


def test_a_step_that_only_decodes_asks_nobody_in_vain(tmp_path: Path) -> None:
    driver = Driver(
        BUNDLED, dtype="bfloat16", cache_mode="attentionstore", dram_bytes=1 << 27, disk_bytes=1 << 27,
        disk_dir=str(tmp_path),
    )  # fmt: skip
    if not driver.compute.runner.saves_rows:
        pytest.skip("these processors have no kernels that save rows by themselves")
    first = driver.ask("a", PROMPT, session="s", max_tokens=4, ignore_eos=True)
    answer = driver.submit("b", [*first.text, *PROMPT[:24]], session="s", max_tokens=40, ignore_eos=True)

    def one_step() -> None:
        """Run a step as the engine's loop does."""
        driver.now += 1.0
        driver._take(driver.engine.step(driver.now))
        driver.engine.poll(driver.now)

    steps = [entered(one_step) for _ in range(24)]
    assert len(answer.token_ids) == 24
    assert min(steps, key=len) <= ASKED
    driver.run()
    driver.close()
