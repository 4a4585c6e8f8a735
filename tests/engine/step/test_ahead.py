"""Tests that the next request's KV loads while the current one runs, as many layers as the read buffer holds."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Answer, Driver, assert_greedy
from tests.engine.models import random_ids

HISTORY = 200
STAGING = 6 * 32  # tokens: too little to fetch a conversation into


def restarted(path: Path, directory: Path, **changes: Any) -> tuple[Driver, list[Answer]]:
    """An engine for one request at a time, and three conversations that are on its disk alone."""
    disk = {"cache_mode": "attentionstore", "disk_bytes": 1 << 26, "disk_dir": str(directory)}
    first = Driver(path, **disk)
    histories = [
        first.ask(f"h{n}", random_ids(HISTORY, n), session=str(n), max_tokens=2, ignore_eos=True) for n in range(3)
    ]
    first.close()
    size = first.engine.model.kv_bytes_per_token
    driver = Driver(path, **disk, max_seqs=1, staging_bytes=STAGING * size, **changes)
    # A model this small computes a history sooner than it is read.
    driver.cache.rates.load_s = lambda direction, num_bytes: 0.0  # type: ignore[method-assign]
    return driver, histories


def submit(driver: Driver, histories: list[Answer]) -> list[Answer]:
    return [
        driver.submit(f"r{n}", history.text + random_ids(9, 10 + n), session=str(n), max_tokens=12, ignore_eos=True)
        for n, history in enumerate(histories)
    ]


def ahead(driver: Driver) -> list[str]:
    """Return who waits and has pages."""
    return [name for name in driver.scheduler.upcoming().members if driver.cache.requests.context(name).rows.pages]


def test_the_read_buffer_fills_while_another_request_runs(path: Path, vanilla: Any, tmp_path: Path) -> None:
    driver, histories = restarted(path, tmp_path, read_buffer_layers=1)
    answers = submit(driver, histories)
    driver.step()
    assert ahead(driver) == ["r1/0", "r2/0"]
    driver.step()
    load = driver.cache.requests.context("r1/0").load
    assert load is not None
    assert driver.engine._transfer.wait_layer(load.job, 0, 10.0)
    for _ in range(5):
        driver.step()
    assert driver.state("r1") == "waiting"
    assert driver.engine._transfer.layers_arrived(load.job) == 1, "the second layer waits for its turn"
    driver.run()
    for history, answer in zip(histories, answers, strict=True):
        assert_greedy(vanilla, answer)
        assert answer.report is not None
        assert answer.report.disk_tokens == len(history.text) - 1
    driver.close()


@pytest.mark.parametrize("layers", [0, 1, -1])
def test_who_is_ahead_may_leave_and_nobody_waits_for_its_load(
    path: Path, vanilla: Any, tmp_path: Path, layers: int
) -> None:
    driver, histories = restarted(path, tmp_path, read_buffer_layers=layers)
    answers = submit(driver, histories)
    driver.step()
    assert ahead(driver) == ["r1/0", "r2/0"]
    driver.engine.abort("r1")
    del driver.answers["r1", 0]
    driver.run()
    assert_greedy(vanilla, answers[0])
    assert_greedy(vanilla, answers[2])
    again = driver.ask("again", [*histories[1].text, 7], session="1", max_tokens=3, ignore_eos=True)
    assert again.cached == len(histories[1].text) - 1, "what it was has not changed"
    assert_greedy(vanilla, again)
    driver.close()


@pytest.mark.parametrize("pages", [12, 14, 20])
def test_who_is_ahead_gives_way_when_room_gets_scarce(path: Path, vanilla: Any, tmp_path: Path, pages: int) -> None:
    driver, histories = restarted(path, tmp_path, read_buffer_layers=1, hbm_tokens=pages * 32)
    answers = [
        driver.submit(f"r{n}", [*history.text, 5], session=str(n), max_tokens=50, ignore_eos=True)
        for n, history in enumerate(histories)
    ]
    driver.run()
    for answer in answers:
        assert_greedy(vanilla, answer)
        assert answer.cached > 0
    assert driver.engine.stats().preemptions == 0
    driver.close()
