"""Tests a history of several extents, one of which cannot be read: its KV is computed, and the others stay and serve
the next turn."""

import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.storage.extent_format import aligned, header_size
from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids

SETTINGS = {"hbm_tokens": 1024, "max_context": 256}
TURNS, ANSWER = (55, 55, 55, 15, 15), 9  # tokens; the first three leave 1, 2 and 2 full blocks and an open one


def flip(file: Path, _: pytest.MonkeyPatch) -> None:
    """A bit of the first block."""
    data = bytearray(file.read_bytes())
    data[aligned(header_size(bytes(data))) + 77] ^= 1
    file.write_bytes(data)


def cut(file: Path, _: pytest.MonkeyPatch) -> None:
    os.truncate(file, file.stat().st_size // 2)


def delete(file: Path, _: pytest.MonkeyPatch) -> None:
    file.unlink()


def hang(file: Path, patch: pytest.MonkeyPatch) -> None:
    before_reads_of(file, patch, lambda: time.sleep(3.0))


def broken(file: Path, patch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before_reads_of(file, patch, fail)


def before_reads_of(file: Path, patch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    inode, preadv = file.stat().st_ino, os.preadv

    def patched(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == inode:
            do()
        return preadv(fd, *arguments)

    patch.setattr(os, "preadv", patched)


def with_disk(path: Path, tmp_path: Path, **changes: Any) -> Driver:
    """A machine that waits for a load as long as the disk is given."""
    tiers = {"disk_bytes": 1 << 28, "disk_dir": str(tmp_path), "io_deadline_s": 20.0}
    driver = Driver(path, cache_mode="attentionstore", **{**SETTINGS, **tiers, **changes})
    driver.cache.rates.load_s = lambda direction, num_bytes: 0.0  # type: ignore[method-assign]
    driver.cache._loads._worth_waiting_s = lambda load: math.inf  # type: ignore[method-assign]
    driver.cache._loads.is_fetch_late = lambda context: False  # type: ignore[method-assign]
    return driver


def turn(driver: Driver, number: int, text: list[int]) -> Answer:
    prompt = text + random_ids(TURNS[number], number)
    return driver.ask(f"turn {number}", prompt, session="s", max_tokens=ANSWER, ignore_eos=True)


def is_a_recompute(path: Path, answer: Answer) -> bool:
    plain = Driver(path, cache_mode="recompute", **SETTINGS)
    return plain.ask("x", answer.prompt, max_tokens=ANSWER, ignore_eos=True).token_ids == answer.token_ids


def addresses(driver: Driver) -> list[tuple[int, int] | None]:
    """Return the places on disk of the history's full blocks, in order."""
    rows = [driver.cache.tiers.table.get(key) for key in driver.cache.sessions.contexts["t", "", "s"].keys]
    return [None if row is None else row.copies.get("disk") for row in rows]


def leave_it_to_the_disk(driver: Driver) -> None:
    for key in driver.cache.sessions.contexts["t", "", "s"].all_keys:
        row = driver.cache.tiers.table.get(key)
        if row is not None:
            driver.cache.tiers.dram.rows.drop(row)
            driver.cache.tiers.hbm.leave(row)


def wait_until_it_is_used(driver: Driver) -> None:
    """Wait until a disk that was given up is used again, and has what was computed meanwhile."""
    end_s = time.monotonic() + 20
    while driver.cache.tiers.disk.problem is not None and time.monotonic() < end_s:
        driver.engine.poll(time.monotonic())
        time.sleep(0.01)
    driver.settle()


def file_of(tmp_path: Path, extent_id: int) -> Path:
    (file,) = tmp_path.rglob(f"{extent_id:016x}.kv")
    return file


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", ["load", "fetch"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(flip, "checksum"), (cut, "short_read"), (delete, "missing"), (hang, "deadline"), (broken, "io")],
)
def test_only_what_is_known_to_be_bad_leaves_the_disk(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, reason: str, way: str
) -> None:
    driver = with_disk(path, tmp_path, dram_bytes=0 if way == "load" else 1 << 24, max_seqs=1)
    text: list[int] = []
    for number in range(3):
        text = turn(driver, number, text).text
    before = addresses(driver)
    extents = sorted({address[0] for address in before if address is not None})
    assert len(extents) == 3
    leave_it_to_the_disk(driver)
    victim, reads = extents[1], driver.engine._transfer._disk._reads  # type: ignore[union-attr]
    assert reads is not None
    if reason == "deadline":
        reads._deadline_s = 0.5
    with monkeypatch.context() as patch:
        spoil(file_of(tmp_path, victim), patch)
        if way == "fetch":
            driver.submit("beside", random_ids(20, 99), max_tokens=12, ignore_eos=True)
            driver.step()
        answer = turn(driver, 3, text)
        while reads.lost:
            time.sleep(0.01)
    reads._deadline_s = 20.0
    wait_until_it_is_used(driver)
    assert is_a_recompute(path, answer)
    assert driver.engine.stats().load_failures[reason] > 0
    after = addresses(driver)
    bad = {"checksum": [(victim, 0)], "deadline": []}.get(reason, [(victim, 0), (victim, 1)])
    kept = {address for address in before if address is not None} - set(bad)
    assert kept <= set(after), "what was not bad has left the disk"
    assert all(file_of(tmp_path, extent_id).exists() for extent_id, _ in kept)
    assert not {*bad} & {*after}
    # Without DRAM, what is computed while the disk is given up has no place in which it could wait for it.
    may_lack = 1 if (reason, way) == ("deadline", "load") else 0
    assert after.count(None) <= may_lack, "what was computed again is on disk again"
    leave_it_to_the_disk(driver)
    again = turn(driver, 4, answer.text)
    assert is_a_recompute(path, again)
    assert again.report is not None
    if None not in after:
        assert set(again.report.miss_reasons) == {"new"}
        assert again.report.disk_tokens == len(answer.text) - 1
    driver.close()
