"""Tests a disk that has become slow: its loads are abandoned, their KV is computed, and the disk is tried again
later."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids

HISTORY, ANSWER, LAYERS = 150, 9, 4
READ_S = 0.5
SETTINGS = {"hbm_tokens": 512, "max_context": 256}


class Reads:
    """Every read takes READ_S while the disk is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.is_slow, self._real = 0, True, os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, *arguments: Any) -> int:
        self.begun += 1
        if self.is_slow:
            time.sleep(READ_S)
        return self._real(*arguments)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def with_disk(path: Path, tmp_path: Path, **changes: Any) -> Driver:
    """A machine on which a history takes 0.3 s to compute, whatever this one needs for it."""
    tiers = {"dram_bytes": 0, "disk_bytes": 1 << 28, "disk_dir": str(tmp_path), "io_deadline_s": 20.0, **changes}
    driver = Driver(path, cache_mode="attentionstore", **SETTINGS, **tiers)
    driver.cache.rates.expect_steps(0.001, 0.002)
    driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
    return driver


def first_turns(driver: Driver, count: int) -> list[list[int]]:
    """Texts of conversations that lie on disk, and nowhere else."""
    texts = [
        driver.ask(f"a{i}", random_ids(HISTORY, i), session=f"s{i}", max_tokens=ANSWER, ignore_eos=True).text
        for i in range(count)
    ]
    for session in driver.cache.sessions.contexts.values():
        for key in session.all_keys:
            row = driver.cache.tiers.table.get(key)
            assert row is not None
            assert "disk" in row.copies
            if "dram" in row.copies:
                driver.cache.tiers.dram.rows.drop(row)
            if row.page is not None:
                driver.cache.tiers.hbm.evict(key)
    return texts


def second_turn(driver: Driver, number: int, text: list[int]) -> Answer:
    prompt = [*text, 7, 8]
    answer = driver.submit(f"b{number}", prompt, session=f"s{number}", max_tokens=ANSWER, ignore_eos=True)
    driver.run(max_steps=100_000)
    assert answer.report is not None
    assert sum(answer.report.miss_reasons.values()) == answer.report.computed_tokens
    return answer


def is_a_recompute(path: Path, answer: Answer) -> bool:
    plain = Driver(path, cache_mode="recompute", **SETTINGS)
    return plain.ask("x", answer.prompt, max_tokens=ANSWER, ignore_eos=True).token_ids == answer.token_ids


def test_a_load_that_is_dearer_than_to_compute_is_given_up(path: Path, tmp_path: Path, reads: Reads) -> None:
    reads.is_slow = False
    driver = with_disk(path, tmp_path)
    (text,) = first_turns(driver, 1)
    reads.is_slow, reads.begun = True, 0
    answer = second_turn(driver, 0, text)
    assert answer.report is not None
    assert reads.begun < LAYERS, "nobody has waited for the rest"
    assert (answer.report.disk_tokens, answer.report.hbm_tokens) == (0, 0)
    assert answer.report.miss_reasons["load_late"] == HISTORY + ANSWER - 1
    assert driver.engine.stats().load_failures.keys() == {"late"}
    assert answer.timings[0] is not None
    assert answer.timings[0].load_ms >= 250
    assert is_a_recompute(path, answer)
    # What is on disk is as good as before.
    reads.is_slow = False
    rows = [driver.cache.tiers.table.get(key) for key in driver.cache.sessions.contexts["t", "", "s0"].keys]
    assert all(row is not None and "disk" in row.copies for row in rows)
    driver.close()


def test_a_slow_disk_is_hardly_asked_and_a_fast_one_believed_again_within_ten_requests(
    path: Path, tmp_path: Path, reads: Reads
) -> None:
    reads.is_slow = False
    driver = with_disk(path, tmp_path)
    texts = first_turns(driver, 22)
    reads.is_slow, reads.begun = True, 0
    for number in range(12):
        answer = second_turn(driver, number, texts[number])
        assert answer.report is not None
        assert answer.report.disk_tokens == 0
    # The first load, and a look after two, and after four more.
    assert driver.engine.stats().load_failures["late"] <= 5 + 1 + 1
    assert reads.begun < 12, "most requests have not asked"
    reads.is_slow = False
    found = []
    for number in range(12, 22):
        answer = second_turn(driver, number, texts[number])
        assert answer.report is not None
        found.append(answer.report.disk_tokens)
    assert max(found) > 128, found
    driver.close()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("waits", ["for room", "beside another who decodes", "for a load that others gave up"])
def test_whoever_waits_for_a_slow_load_computes(path: Path, tmp_path: Path, reads: Reads, waits: str) -> None:
    reads.is_slow = False
    driver = with_disk(path, tmp_path, **({"read_buffer_layers": 1} if waits == "for room" else {}))
    texts = first_turns(driver, 3)
    reads.is_slow, reads.begun = True, 0
    beside = None
    if waits == "beside another who decodes":
        beside = driver.submit("beside", random_ids(20, 99), max_tokens=60, ignore_eos=True)
        driver.step()
    answers = [
        driver.submit(f"b{number}", [*text, 7, 8], session=f"s{number}", max_tokens=ANSWER, ignore_eos=True)
        for number, text in enumerate(texts)
    ]
    driver.run(max_steps=100_000)
    assert reads.begun <= 2 * len(texts), "a slow read, of a header as a rule, is not waited for"
    for answer in answers:
        assert answer.report is not None
        assert answer.report.disk_tokens == 0
        assert is_a_recompute(path, answer)
    assert beside is None or is_done(beside)
    driver.close()


def test_a_turn_that_has_come_waits_for_a_fetch_no_longer_than_computing_takes(
    path: Path, tmp_path: Path, reads: Reads
) -> None:
    reads.is_slow = False
    driver = with_disk(path, tmp_path, dram_bytes=1 << 24, max_seqs=1)
    texts = first_turns(driver, 2)
    beside = driver.submit("beside", random_ids(20, 99), max_tokens=12, ignore_eos=True)
    driver.step()
    reads.is_slow, reads.begun = True, 0
    answers = [
        driver.submit(f"b{number}", [*text, 7, 8], session=f"s{number}", max_tokens=ANSWER, ignore_eos=True)
        for number, text in enumerate(texts)
    ]
    driver.run(max_steps=100_000)
    assert is_done(beside)
    assert reads.begun > 0, "they were fetched while they waited"
    for answer in answers:
        assert answer.report is not None
        assert (answer.report.dram_tokens, answer.report.disk_tokens) == (0, 0)
        assert answer.report.miss_reasons["load_late"] == HISTORY + ANSWER - 1
        assert is_a_recompute(path, answer)
    # A disk of which this is known is asked by nobody who waits, and one that is quick again soon is.
    assert not driver.cache.rates.is_worth_fetching("disk_to_dram", 4 * driver.cache.tiers.dram.rows.slot_bytes, 128)
    driver.close()


def is_done(answer: Answer) -> bool:
    return answer.finish_reason == "length"


def test_a_disk_as_fast_as_it_seemed_is_waited_for(path: Path, tmp_path: Path, reads: Reads) -> None:
    """Slower than computing the new tokens, and still faster than computing all."""
    reads.is_slow = False
    driver = with_disk(path, tmp_path)
    driver.cache.rates.expect_steps(1.0, 1.0)  # a model for which half a minute on the disk is nothing
    (text,) = first_turns(driver, 1)
    reads.is_slow = True
    answer = second_turn(driver, 0, text)
    assert answer.report is not None
    assert answer.report.disk_tokens == 128, "whole blocks; those of the open one would have been late again"
    assert not driver.engine.stats().load_failures
    assert is_a_recompute(path, answer)
    driver.close()
