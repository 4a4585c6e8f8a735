"""Tests that rows saved by kernels are sealed at the end of an answer, and before anything that would miss them."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Driver

BUNDLED = Path(__file__).parents[3] / "model" / "bundled"
PROMPT = list(range(100, 300))  # six blocks, and a part of one


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    drivers = []

    def made(**changes: Any) -> Driver:
        settings = {"dtype": "bfloat16", "cache_mode": "attentionstore", "dram_bytes": 1 << 27, "hbm_tokens": 4096}
        driver = Driver(BUNDLED, **{**settings, **changes})
        if not driver.compute.runner.saves_rows:
            pytest.skip("these processors have no such kernels")
        drivers.append(driver)
        return driver

    yield made
    for driver in drivers:
        driver.close()


def saved(driver: Driver) -> int:
    """Blocks in DRAM."""
    return sum("dram" in row.copies for row in driver.cache.tiers.table)


def test_blocks_of_an_answer_are_saved_at_its_end(make: Any) -> None:
    driver = make()
    driver.submit("a", PROMPT, max_tokens=90, ignore_eos=True)
    for _ in range(80):
        driver.step()
    assert saved(driver) == 0
    assert driver.cache.in_flight >= 6
    driver.run()
    assert saved(driver) == 10  # full blocks and the open one of 289 rows
    assert all("dram" in row.copies for row in driver.cache.tiers.table)


def test_they_are_saved_before_another_request_is_admitted(make: Any) -> None:
    driver = make()
    first = driver.submit("a", PROMPT, max_tokens=90, ignore_eos=True)
    for _ in range(20):
        driver.step()
    assert saved(driver) == 0
    second = driver.submit("b", [*PROMPT[:100], 7], max_tokens=4)
    driver.step()
    assert saved(driver) >= 6
    driver.run()
    assert second.report is not None
    assert second.report.hbm_tokens >= 96
    assert len(first.token_ids) == 90


@pytest.mark.parametrize(
    ("changes", "prompts"),
    [
        ({"hbm_tokens": 192}, [PROMPT[:150]]),  # a page is left
        ({"dram_bytes": 250_000}, [list(range(n, n + 900)) for n in (100, 1100)]),  # 69 slots, 56 of them taken
    ],
)
def test_they_are_saved_at_once_where_room_is_scarce(make: Any, changes: dict[str, int], prompts: Any) -> None:
    driver = make(**changes)
    for n, prompt in enumerate(prompts):
        driver.submit(f"{n}", prompt, max_tokens=40, ignore_eos=True)
    for _ in range(20):
        driver.step()
    assert saved(driver) >= 4
    driver.run()


def test_what_stays_behind_a_cut_in_the_middle_of_an_answer_comes_from_where_it_was_saved(make: Any) -> None:
    driver = make(max_context=256, truncation="auto")
    answer = driver.ask("a", PROMPT, max_tokens=150, ignore_eos=True, truncation="auto")
    assert len(answer.token_ids) == 150
    assert answer.report is not None
    assert answer.report.truncated_tokens
    assert all(row.hops == 0 for row in driver.cache.tiers.table), "no key was un-rotated"
