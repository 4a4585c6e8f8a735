"""Tests a whole engine on a disk that is slow, hangs, is read-only or full, or vanishes, at its start and in service:
it serves, no request waits for the disk beyond its deadline, every answer equals that of a recomputation, and the KV on
the disk is used when that answers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.storage import disk_watch
from reprise.engine.build import room, tiers
from reprise.engine.model.loading import ModelRefused
from tests.cache.storage.bad_disk import KINDS, BadDisk, Kind
from tests.engine.build.test_tiers import SLOT, reference, tiered, turn
from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids, save_tiny
from tests.engine.test_sessions import delete
from tests.test_faults import assert_at_rest, records, settle_without_writes

DEADLINE_S = 0.5
DISK = {"dram_bytes": 0, "disk_bytes": 1 << 28, "io_deadline_s": DEADLINE_S}
CONVERSATIONS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[list[int]]]:
    """The texts after every turn."""
    driver, texts, all_texts = reference(path), first_texts(), []
    for number in range(4):
        texts = [ask(driver, number, conversation, texts[conversation]).text for conversation in range(CONVERSATIONS)]
        all_texts.append(texts)
    return all_texts


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    monkeypatch.setattr(disk_watch, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(disk_watch, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(tiers, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(room, "_PATIENCE_S", 0.3)
    bad = BadDisk(monkeypatch, slow_s=1.5 * DEADLINE_S)
    yield bad
    bad.mend()


def first_texts() -> list[list[int]]:
    return [random_ids(40, 0) for _ in range(CONVERSATIONS)]


def ask(driver: Driver, number: int, conversation: int, text: list[int]) -> Answer:
    prompt = text + turn(number, conversation)
    answer = driver.ask(f"{number}/{conversation}", prompt, session=f"s{conversation}", max_tokens=9, ignore_eos=True)
    assert answer.error is None, answer.error
    assert answer.report is not None
    return answer


def problem_of(driver: Driver) -> str | None:
    driver.engine.poll(driver.now)
    return driver.engine.stats().tier_problems.get("disk")


def poll_until(driver: Driver, condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        driver.engine.poll(driver.now)
        time.sleep(0.005)


def served(driver: Driver, number: int, expected: list[list[list[int]]], conversations: range) -> list[Answer]:
    """Let a turn of conversations be answered; checks the answers."""
    before = expected[number - 1]
    answers = [ask(driver, number, conversation, before[conversation]) for conversation in conversations]
    assert [answer.text for answer in answers] == [expected[number][conversation] for conversation in conversations]
    return answers


def converse(driver: Driver, turns: int, expected: list[list[list[int]]]) -> None:
    texts = first_texts()
    for number in range(turns):
        texts = [ask(driver, number, conversation, texts[conversation]).text for conversation in range(CONVERSATIONS)]
        assert texts == expected[number]
    driver.settle()


def without_settling(driver: Driver) -> None:
    """Settle from now on as far as a bad disk allows."""
    driver.settle = lambda: settle_without_writes(driver)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_bad_at_the_start(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], disk: BadDisk, kind: Kind
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, 2, expected)
    driver.close()
    disk.spoil(kind)
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    without_settling(driver)
    is_read = kind == "full"  # what lies on a full disk is read
    assert (problem_of(driver) is None) == is_read
    assert any("is not used yet" in warning for warning in driver.engine.model.warnings) == (not is_read)
    (answer,) = served(driver, 2, expected, range(1))
    assert answer.report is not None
    assert (answer.report.disk_tokens > 0) == is_read
    disk.mend()
    poll_until(driver, lambda: problem_of(driver) is None)
    # These two have been idle since the restart: only the disk has their history.
    for answer in served(driver, 2, expected, range(1, CONVERSATIONS)):
        assert answer.report is not None
        assert answer.report.disk_tokens > 32
    (answer,) = served(driver, 3, expected, range(1))
    driver.now += 60  # seconds, to the next try at what was not written
    driver.engine.poll(driver.now)
    poll_until(driver, lambda: not driver.engine.is_moving())
    assert_at_rest(driver)
    driver.close()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    (answer,) = served(driver, 3, expected, range(1))
    assert answer.report is not None
    assert answer.report.disk_tokens > 32, "what was computed without the disk is on it"
    driver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_turns_bad_in_service(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], disk: BadDisk, kind: Kind
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, 2, expected)
    without_settling(driver)
    disk.spoil(kind)
    started = time.monotonic()
    served(driver, 2, expected, range(1))
    first_s, calls = time.monotonic() - started, disk.num_calls
    (answer,) = served(driver, 2, expected, range(1, 2))
    assert answer.report is not None
    if kind in ("full", "read-only"):
        assert problem_of(driver) is None
        assert answer.report.disk_tokens > 0, "what is there can be read"
    else:
        assert problem_of(driver)
        assert "load_failed" in answer.report.miss_reasons
        # One deadline for a read and one for a write that began with it, on a busy machine.
        assert first_s < 2 * DEADLINE_S + 5.0
        if kind != "slow":  # there, what was given up goes on for a while
            assert disk.num_calls == calls, "the second turn does not ask the disk, so it waits for nothing"
    disk.mend()
    poll_until(driver, lambda: problem_of(driver) is None)
    (answer,) = served(driver, 2, expected, range(2, 3))
    assert answer.report is not None
    assert answer.report.disk_tokens > 32, "its KV was on the disk all the time"
    driver.now += 60  # seconds, to the next try at what was not written
    served(driver, 3, expected, range(CONVERSATIONS))
    driver.now += 60
    driver.engine.poll(driver.now)
    poll_until(driver, lambda: not driver.engine.is_moving())
    assert_at_rest(driver)
    driver.close()


def test_a_shutdown_does_not_wait_for_a_disk_that_hangs(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], disk: BadDisk
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, 1, expected)
    without_settling(driver)
    disk.spoil("hung")
    served(driver, 1, expected, range(1))
    started = time.monotonic()
    driver.close()
    assert time.monotonic() - started < 5.0


def test_a_session_that_is_deleted_while_nobody_knows_what_the_disk_has(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], disk: BadDisk
) -> None:
    """The client is told that bytes remain, and they go when the disk is taken. Another session's stay."""
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, 1, expected)
    driver.close()
    of_s0, of_s1, of_s2 = sorted(records(tmp_path), key=lambda record: record.stem)  # they were written in this order
    disk.spoil("hung")
    driver = tiered(path, **{**DISK, "dram_bytes": 400 * SLOT}, disk_dir=str(tmp_path))
    without_settling(driver)
    assert delete(driver, "s0").error_code == "undeleted"
    assert delete(driver, "s0").error_code == "undeleted", "still"
    served(driver, 1, expected, range(1, 2))  # goes on meanwhile
    assert delete(driver, "s1").error_code == "undeleted"
    disk.mend()
    poll_until(driver, lambda: problem_of(driver) is None)
    driver.now += 60
    driver.engine.poll(driver.now)
    poll_until(driver, lambda: not driver.engine.is_moving())
    assert {name[2] for name in driver.cache.sessions.contexts} == {"s2"}
    assert delete(driver, "s0").error_code == "not_found"
    assert {of_s0, of_s1, of_s2} & set(records(tmp_path)) == {of_s2}
    (answer,) = served(driver, 1, expected, range(2, 3))
    assert answer.cached > 32, "with a block that s0 had written"
    assert_at_rest(driver)
    driver.close()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    assert {name[2] for name in driver.cache.sessions.contexts} == {"s2"}
    driver.close()


def test_a_session_that_is_born_again_before_the_disk_is_taken_stays(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], disk: BadDisk
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, 1, expected)
    driver.close()
    disk.spoil("hung")
    driver = tiered(path, **{**DISK, "dram_bytes": 400 * SLOT}, disk_dir=str(tmp_path))
    without_settling(driver)
    assert delete(driver, "s0").error_code == "undeleted"
    text = ask(driver, 7, 0, first_texts()[0]).text
    disk.mend()
    poll_until(driver, lambda: problem_of(driver) is None)
    driver.now += 60
    driver.engine.poll(driver.now)
    poll_until(driver, lambda: not driver.engine.is_moving())
    assert {name[2] for name in driver.cache.sessions.contexts} == {"s0", "s1", "s2"}
    driver.close()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    answer = ask(driver, 8, 0, text)
    assert answer.report is not None
    assert answer.report.disk_tokens > 32
    driver.close()


def test_an_automatic_size_waits_for_the_disk(path: Path, tmp_path: Path, disk: BadDisk) -> None:
    disk.spoil("hung")
    settings: dict[str, Any] = {**DISK, "disk_bytes": None}
    driver = tiered(path, **settings, disk_dir=str(tmp_path))
    assert problem_of(driver)
    guess = driver.engine.stats().tier_capacity["disk"]
    disk.mend()
    poll_until(driver, lambda: problem_of(driver) is None)
    assert 0 < driver.engine.stats().tier_capacity["disk"] <= guess
    driver.close()


def test_a_persons_mistake_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file in its place")
    with pytest.raises(ModelRefused, match="cannot be used"):
        tiered(path, **DISK, disk_dir=str(tmp_path))
