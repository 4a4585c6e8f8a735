"""Tests faults of stored KV in a whole engine: every answer still equals that of a recomputation, the engine survives,
the counters report what happened, and nothing stays pinned or in progress."""

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.storage.slab import Slab
from reprise.engine.model.loading import ModelRefused
from tests.cache.storage.disk_helpers import forge
from tests.engine.build.test_tiers import SLOT, converse, reference, tiered
from tests.engine.driver import Driver
from tests.engine.models import random_ids, save_tiny
from tests.engine.test_sessions import delete

DISK = {"dram_bytes": 0, "disk_bytes": 1 << 28, "io_deadline_s": 2.0}
CONVERSATIONS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[list[int]]]:
    """The texts after every turn."""
    driver, texts, all_texts = reference(path), None, []
    for number in range(5):
        texts, _ = converse(driver, turns=1, first=number, texts=texts)
        all_texts.append(texts)
    return all_texts


def records(directory: Path) -> list[Path]:
    return sorted(directory.glob("kv/*/??/*.kv"))


def index_of(directory: Path) -> Path:
    (index,) = directory.glob("kv/*/index.sqlite")
    return index


def settle_without_writes(driver: Driver) -> None:
    """Settle as `Driver.settle` does, but what cannot be written stays where it is."""
    end = time.monotonic() + 30
    driver.engine.poll(driver.now)
    while driver.cache.in_flight:
        assert time.monotonic() < end, "the transfers do not come to an end"
        driver.engine._transfer.wait(0.01)
        driver.engine.poll(driver.now)
    driver.check()


def assert_at_rest(driver: Driver) -> None:
    stats = driver.engine.stats()
    assert (stats.leases, stats.in_flight, stats.running, stats.waiting) == (0, 0, 0, 0)
    dram = driver.cache.tiers.dram
    assert not any(dram.rows._slots._pins)
    assert not dram.saves._sources
    assert dram.rows.num_free + dram.rows.resident == dram.rows.num_slots


# --- stored bytes -----------------------------------------------------------------------------------------------------


def truncate_to_nothing(directory: Path) -> None:
    for path in records(directory):
        with suppress(FileNotFoundError):  # the engine has just deleted it
            os.truncate(path, 0)


def lose_the_last_byte(directory: Path) -> None:
    for path in records(directory):
        os.truncate(path, path.stat().st_size - 1)


def flip_the_header(directory: Path) -> None:
    for path in records(directory):
        flip(path, 20)


def flip_everywhere(directory: Path) -> None:
    for path in records(directory):
        with suppress(FileNotFoundError):  # the engine has just deleted it
            for place in range(0, path.stat().st_size, 4000):
                flip(path, place)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 255]))


def put_one_in_the_place_of_all(directory: Path) -> None:
    first, *others = records(directory)
    for path in others:
        shutil.copyfile(first, path)


def put_another_file_in_its_place(directory: Path) -> None:
    for path in records(directory):
        path.unlink()
        path.write_bytes(b"not a record" * 1000)


def put_a_directory_in_its_place(directory: Path) -> None:
    for path in records(directory):
        path.unlink()
        path.mkdir()


def delete_all_directories(directory: Path) -> None:
    for path in directory.glob("kv/*/??"):
        shutil.rmtree(path, ignore_errors=True)  # the engine may write into it meanwhile


def swap_and_rehash(directory: Path) -> None:
    """Every record gets the bytes of another of its size, after a header that names its own id and hashes rightly."""
    by_size: dict[int, list[Path]] = {}
    for path in records(directory):
        by_size.setdefault(path.stat().st_size, []).append(path)
    for paths in by_size.values():
        stored = [path.read_bytes() for path in paths]
        for path, data in zip(paths, stored[1:] + stored[:1], strict=True):
            path.write_bytes(data)
            forge(path, lambda header, to=int(path.stem, 16): replace(header, extent_id=to))


RECORD_FAULTS: dict[Callable[[Path], None], set[str]] = {
    truncate_to_nothing: {"short_read", "missing", "format", "checksum"},
    lose_the_last_byte: {"short_read", "format", "checksum"},
    flip_the_header: {"checksum", "format", "fingerprint", "missing"},
    flip_everywhere: {"checksum", "format", "fingerprint", "missing"},
    put_one_in_the_place_of_all: {"missing", "format", "fingerprint"},
    put_another_file_in_its_place: {"format", "short_read", "checksum", "missing"},
    swap_and_rehash: {"forged", "missing"},
    put_a_directory_in_its_place: {"io", "missing", "format"},
    delete_all_directories: {"missing"},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", RECORD_FAULTS)
def test_records_spoiled_between_turns(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], fault: Callable[[Path], None]
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, turns=2)
    assert records(tmp_path)
    fault(tmp_path)
    texts, tiers = converse(driver, turns=1, first=2, texts=expected[1])
    assert texts == expected[2]
    stats = driver.engine.stats()
    assert sum(stats.load_failures.values()) > 0
    assert set(stats.load_failures) <= RECORD_FAULTS[fault], stats.load_failures
    assert tiers["load_failed"] > 0
    # What was written since is believed again.
    texts, tiers = converse(driver, turns=1, first=3, texts=texts)
    assert texts == expected[3]
    assert tiers["disk"] > 0
    assert_at_rest(driver)
    driver.close()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", [flip_everywhere, truncate_to_nothing, delete_all_directories])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_records_spoiled_while_requests_run(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], fault: Callable[[Path], None], steps: int
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path), read_buffer_layers=1)
    converse(driver, turns=2)
    step = driver.step
    count = 0

    def spoiling() -> Any:
        nonlocal count
        count += 1
        if count % steps == 0:
            fault(tmp_path)
        return step()

    driver.step = spoiling  # type: ignore[method-assign]
    driver.settle = lambda: settle_without_writes(driver)  # type: ignore[method-assign]
    texts, _ = converse(driver, turns=3, first=2, texts=expected[1], at_once=True)
    assert texts == expected[4]
    assert_at_rest(driver)
    driver.close()


@pytest.mark.parametrize("everything", [False, True])
def test_slots_spoiled_in_memory(path: Path, tmp_path: Path, expected: list[list[list[int]]], everything: bool) -> None:
    """A copy on disk, if there is one, is used instead."""
    tiers_below = {"disk_bytes": 1 << 28 if everything else 0}
    driver = tiered(path, dram_bytes=100 * SLOT, **tiers_below, disk_dir=str(tmp_path))
    converse(driver, turns=2)
    slab: Slab = driver.engine._transfer._slab
    for slot in range(slab.num_slots):
        slab.segment(1, slot)[100] ^= 1
    texts, tiers = converse(driver, turns=1, first=2, texts=expected[1])
    assert texts == expected[2]
    assert driver.engine.stats().load_failures == {"checksum": driver.engine.stats().load_failures["checksum"]}
    assert (tiers["disk"] > 0) == everything
    assert_at_rest(driver)
    driver.close()


def test_an_empty_file_with_the_highest_id_ends_no_engine(
    path: Path, tmp_path: Path, expected: list[list[list[int]]]
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    driver.close()
    (index_of(tmp_path).parent / "ff" / "3fffffffffffffff.kv").touch()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    texts, tiers = converse(driver, turns=1, first=2, texts=texts)
    assert (texts, tiers["disk"] > 0) == (expected[2], True)
    assert not driver.engine.stats().write_failures
    assert_at_rest(driver)
    driver.close()


# --- the index --------------------------------------------------------------------------------------------------------


def garbage_in_the_index(directory: Path) -> None:
    index_of(directory).write_bytes(b"garbage" * 1000)


def delete_the_index(directory: Path) -> None:
    for path in index_of(directory).parent.glob("index.sqlite*"):
        path.unlink()


def cut_the_index(directory: Path) -> None:
    os.truncate(index_of(directory), 5000)


def a_directory_for_an_index(directory: Path) -> None:
    index = index_of(directory)
    delete_the_index(directory)
    index.mkdir()


INDEX_FAULTS = [garbage_in_the_index, delete_the_index, cut_the_index, a_directory_for_an_index]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", INDEX_FAULTS)
@pytest.mark.parametrize("running", [False, True])
def test_the_index_is_spoiled(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], fault: Callable[[Path], None], running: bool
) -> None:
    """The fault comes between two runs, or in the middle of one. The next start makes the index of the records."""
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    if running:
        fault(tmp_path)
        texts, tiers = converse(driver, turns=1, first=2, texts=texts)
        assert tiers["disk"] > 0
    driver.close()
    if not running:
        fault(tmp_path)
    first = 3 if running else 2
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, tiers = converse(driver, turns=1, first=first, texts=texts)
    assert texts == expected[first]
    assert tiers["disk"] > 0
    assert tiers["hbm"] + tiers["disk"] >= sum(len(text) - 1 for text in expected[first - 1]) * 0.95
    assert_at_rest(driver)
    driver.close()


def test_the_index_is_locked_by_somebody_else(path: Path, tmp_path: Path, expected: list[list[list[int]]]) -> None:
    """Records that cannot be noted in the index while the server runs are found later."""
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=1)
    texts = texts[:1]
    other = sqlite3.connect(index_of(tmp_path), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    texts, _ = converse(driver, turns=1, first=1, texts=texts)
    other.close()
    assert texts == expected[1][:1]
    driver.close()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, tiers = converse(driver, turns=1, first=2, texts=texts)
    assert texts == expected[2][:1]
    assert tiers["disk"] > 0
    assert_at_rest(driver)
    driver.close()


# --- the directory ----------------------------------------------------------------------------------------------------


def test_foreign_files_are_left_alone(path: Path, tmp_path: Path, expected: list[list[list[int]]]) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    driver.close()
    own = index_of(tmp_path).parent
    record = records(tmp_path)[0]
    foreign = {
        tmp_path / "notes.txt": b"mine",
        tmp_path / "kv" / "README": b"mine",
        own / "photo.jpg": b"mine",
        record.parent / "something.else": b"mine",
    }
    for file, data in foreign.items():
        file.write_bytes(data)
    (record.parent / "0123456789abcdef.tmp").write_bytes(b"what a crash left")
    (own / "zz").mkdir()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, tiers = converse(driver, turns=1, first=2, texts=texts)
    assert texts == expected[2]
    assert tiers["disk"] > 0
    assert not driver.engine.stats().load_failures
    driver.close()
    assert {file: file.read_bytes() for file in foreign} == foreign
    assert not (record.parent / "0123456789abcdef.tmp").exists()


@pytest.mark.servers
def test_a_second_engine_is_told_that_the_directory_is_in_use(path: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from reprise.engine.model.loading import ModelRefused\n"
        "from tests.engine.build.test_tiers import tiered\n"
        "try: tiered(Path(sys.argv[1]), disk_bytes=1 << 28, disk_dir=sys.argv[2])\n"
        "except ModelRefused as error: print(error)\n"
    )
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    with pytest.raises(ModelRefused, match="in use by a running server"):
        tiered(path, **DISK, disk_dir=str(tmp_path))
    other = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert f"pid {os.getppid()}" in other.stdout
    assert driver.ask("r", random_ids(50, 1), session="s").error is None
    driver.close()


# --- the device -------------------------------------------------------------------------------------------------------


@contextmanager
def broken_writes(code: int) -> Iterator[None]:
    """Fail as a full or a read-only file system does."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    real_open = os.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        if code == errno.EROFS:
            patch.setattr(
                os,
                "open",
                lambda path, flags, *a, **kw: refuse() if flags & os.O_CREAT else real_open(path, flags, *a, **kw),
            )
            patch.setattr(os, "unlink", refuse)
            patch.setattr(os, "rename", refuse)
        yield


def test_the_directory_is_deleted_under_the_running_engine(
    path: Path, tmp_path: Path, expected: list[list[list[int]]]
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    shutil.rmtree(tmp_path / "kv")
    texts, _ = converse(driver, turns=1, first=2, texts=texts)
    assert texts == expected[2]
    assert list(tmp_path.glob("kv/*/*/*.kv")), "it is used again at once"
    texts, tiers = converse(driver, turns=2, first=3, texts=texts)
    assert texts == expected[4]
    assert tiers["disk"] > 0
    assert not driver.engine.stats().write_failures
    assert_at_rest(driver)
    driver.close()


def test_what_was_on_a_deleted_disk_is_written_again_from_dram(path: Path, tmp_path: Path) -> None:
    driver = tiered(path, **{**DISK, "dram_bytes": 400 * SLOT}, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    before = sum(record.stat().st_size for record in records(tmp_path))
    shutil.rmtree(tmp_path / "kv")
    converse(driver, turns=1, first=2, texts=[text[:] for text in texts])  # the first write finds out
    driver.settle()
    on_disk = sum(record.stat().st_size for record in records(tmp_path))
    assert driver.cache.tiers.disk.used_bytes == on_disk > before
    driver.close()
    driver = tiered(path, **{**DISK, "dram_bytes": 0}, disk_dir=str(tmp_path))
    _, tiers = converse(driver, turns=1, first=2, texts=texts)
    assert not tiers["evicted"], "all of it is there after a restart"
    assert tiers["disk"] > 0
    driver.close()


def test_a_session_that_the_disk_will_not_delete(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client that asked is told so, not that it is gone; it is tried again, by itself and when a client asks
    again."""
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, turns=1)
    there = set(records(tmp_path))

    def left() -> set[Path]:
        return there & set(records(tmp_path))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, "not here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert delete(driver, "s0").error_code == "undeleted"
        assert delete(driver, "s0").error_code == "undeleted", "still"
        assert delete(driver, "s1").error_code == "undeleted"
        driver.settle()
        assert left() == there
    assert delete(driver, "s0").error_code is None
    assert delete(driver, "s0").error_code == "not_found"
    assert len(left()) == len(there) - 1
    driver.now += 60  # seconds, to the next try
    driver.engine.poll(driver.now)
    driver.settle()
    assert len(left()) == len(there) - 2
    assert delete(driver, "s1").error_code == "not_found"
    assert_at_rest(driver)
    driver.close()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    assert {name[2] for name in driver.cache.sessions.contexts} == {"s2", "s3"}
    driver.close()


def test_what_the_disk_would_not_delete_is_tried_at_the_end(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    converse(driver, turns=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        assert delete(driver, "s0").error_code == "undeleted"
    driver.close()
    driver = tiered(path, **DISK, disk_dir=str(tmp_path))
    assert {name[2] for name in driver.cache.sessions.contexts} == {"s1", "s2", "s3"}
    driver.close()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("dram", [0, 12 * SLOT])
def test_a_disk_that_cannot_be_written_for_a_while(
    path: Path,
    tmp_path: Path,
    expected: list[list[list[int]]],
    code: int,
    dram: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = tiered(path, **{**DISK, "dram_bytes": dram}, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    with broken_writes(code), monkeypatch.context() as patch:
        patch.setattr(driver, "settle", lambda: settle_without_writes(driver))
        texts, tiers = converse(driver, turns=1, first=2, texts=texts)
        assert texts == expected[2]
        assert tiers["disk"] > 0, "what is there can be read"
        stats = driver.engine.stats()
        assert stats.refused["disk"] > 0
        assert stats.write_failures["disk"] > 0
        assert not stats.load_failures
    before = driver.engine.stats().moved_bytes["dram_to_disk"]
    driver.now += 60  # seconds, to the next try
    texts, _ = converse(driver, turns=2, first=3, texts=texts)
    assert texts == expected[4]
    assert driver.engine.stats().moved_bytes["dram_to_disk"] > before, "it is used again"
    assert_at_rest(driver)
    driver.close()


def test_a_read_that_hangs(
    path: Path, tmp_path: Path, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at its deadline, and what waited for it is computed; when the device is back, it is used again."""
    driver = tiered(path, **{**DISK, "io_deadline_s": 0.2}, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    released, real = threading.Event(), os.preadv
    hung = 0

    def hanging(*arguments: Any) -> int:
        nonlocal hung
        hung += 1
        released.wait(30)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hanging)
        patch.setattr(driver, "settle", lambda: settle_without_writes(driver))
        started = time.monotonic()
        texts, tiers = converse(driver, turns=1, first=2, texts=texts, at_once=True)
        assert time.monotonic() - started < 15
        released.set()
    assert hung > 0
    assert texts == expected[2]
    assert tiers["load_failed"] > 0
    assert driver.engine.stats().load_failures["deadline"] > 0
    driver.now += 60  # seconds, to the next try at what was not written
    texts, tiers = converse(driver, turns=1, first=3, texts=texts)
    texts, tiers = converse(driver, turns=1, first=4, texts=texts)
    assert texts == expected[4]
    assert tiers["disk"] > 0
    assert_at_rest(driver)
    driver.close()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("end", ["it answers at last", "it fails at its deadline", "the client leaves"])
def test_a_read_that_hangs_holds_up_nobody_else(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A request whose history does not come leaves the batch, and the others of the batch go on."""
    deadline_s = 1.0 if end == "it fails at its deadline" else 20.0
    driver = tiered(path, **{**DISK, "io_deadline_s": deadline_s}, disk_dir=str(tmp_path), hbm_tokens=640)
    first = driver.ask("first", random_ids(150, 1), session="s", ignore_eos=True)
    for key in driver.cache.sessions.contexts["t", "", "s"].keys:
        driver.cache.tiers.hbm.evict(key)
    released, real = threading.Event(), os.preadv
    decoding = driver.submit("decoding", random_ids(40, 2), max_tokens=40, ignore_eos=True)
    while not decoding.token_ids:
        driver.step()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *arguments: (released.wait(30), real(*arguments))[1])
        patch.setattr(driver, "settle", lambda: settle_without_writes(driver))  # the disk is given up
        stuck = driver.submit("stuck", [*first.text, 7, 8], session="s", max_tokens=12, ignore_eos=True)
        driver.step()
        assert driver.state("stuck") == "waiting"
        assert driver.cache._loads.under_way, "its pages may still be written to"
        for _ in range(40):
            driver.step()
        assert decoding.finish_reason == "length"
        if end == "the client leaves":
            driver.engine.abort("stuck")
            del driver.answers["stuck", 0]
        elif end == "it answers at last":
            assert not stuck.token_ids
        if end != "it fails at its deadline":
            released.set()
        driver.run(max_steps=100_000)
        released.set()
    plain = reference(path)
    assert plain.ask("decoding", decoding.prompt, max_tokens=40, ignore_eos=True).token_ids == decoding.token_ids
    if end != "the client leaves":
        assert plain.ask("stuck", stuck.prompt, max_tokens=12, ignore_eos=True).token_ids == stuck.token_ids
        assert stuck.report is not None
        failed = end == "it fails at its deadline"
        assert (stuck.report.computed_tokens > 100) == failed
        assert bool(driver.engine.stats().load_failures) == failed
        assert ("load_failed" in stuck.report.miss_reasons) == failed
    assert_at_rest(driver)
    driver.close()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("at_once", "gbps"), [(False, 0.005), (True, 0.02)])
@pytest.mark.parametrize("tier", ["disk", "dram"])
def test_loads_that_are_never_in_time(
    path: Path,
    tmp_path: Path,
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    at_once: bool,
    gbps: float,
    tier: str,
) -> None:
    """Every step gives up at once on what is not there; what comes is used all the same. gbps: of the link, slower than
    a busy machine computes where a step has to find something missing."""
    monkeypatch.setattr("reprise.engine.step.arrival._PATIENCE_S", 0.0)
    monkeypatch.setattr("reprise.engine.step.arrival._LONE_PATIENCE_S", 0.0)
    tiers_below = {"disk_gbps": gbps} if tier == "disk" else {"dram_bytes": 100 * SLOT, "dram_gbps": gbps}
    driver = tiered(path, **{**DISK, **tiers_below}, disk_dir=str(tmp_path))
    voided: list[str] = []
    void = driver.cache.requests.void
    monkeypatch.setattr(
        driver.cache.requests, "void", lambda request_id: (voided.append(request_id), void(request_id))[1]
    )
    texts, tiers = converse(driver, turns=4, at_once=at_once)
    assert texts == expected[3]
    # Where somebody decodes, the scheduler lets nobody in whose load will not be there in time.
    assert voided or at_once
    assert not driver.engine.stats().load_failures
    assert tiers["computed"] <= 4 * 4 * 80, "only what is new"
    assert_at_rest(driver)
    driver.close()
