"""Tests crashes between any two steps, calls that fail or hang, and directories that disappear."""

import errno
import os
import shutil
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

import reprise.cache.storage.extent_file as extent_file
import reprise.cache.storage.extent_reader as extent_reader
import reprise.cache.storage.extent_store as disk
import reprise.cache.storage.extent_writer as extent_writer
from reprise.cache.storage.directory_lock import DirectoryLocked
from reprise.cache.storage.errors import BlockMissing, TierFailed, TierFull
from reprise.cache.storage.extent_store import READ_THREADS, WRITE_THREADS
from tests.cache.storage.disk_helpers import (
    FINGERPRINT,
    SEGMENTS,
    all_the_rest,
    bytes_of_files,
    file_of,
    make_session,
    make_tier,
    put,
    read_wrongly,
    reason_of,
    record_files,
    reopened,
)

SOON_S = 0.3


class Crash(BaseException):
    """The process is gone: nothing after it runs."""


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename", "fsync"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_between_any_two_steps_of_a_write(tier, tmp_path, monkeypatch, call, when):
    kept = put(tier, "kept")
    real = getattr(os, call)

    def dying(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, call, dying)
        patch.setattr(os, "unlink", lambda *_, **__: None)  # a dead process tidies nothing
        with pytest.raises(Crash):
            put(tier, "lost")
    tier, extents, _ = reopened(tier, tmp_path)
    renamed = call == "fsync" or (call, when) == ("rename", "after")
    assert len(extents) == (2 if renamed else 1)
    assert extents[0] == kept
    assert all(read_wrongly(tier, info) == [] for info in extents)
    assert tier.used_bytes() == bytes_of_files(tmp_path)
    tier.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "rename"])
@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.ENOSPC, TierFull), (errno.EDQUOT, TierFull), (errno.EIO, TierFailed), (errno.EROFS, TierFailed)],
)
def test_a_write_that_fails_leaves_nothing(tier, tmp_path, monkeypatch, call, code, expected):
    def failing(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(expected):
            put(tier, "x")
    assert (tier.used_bytes(), record_files(tmp_path)) == (0, [])
    assert read_wrongly(tier, put(tier, "x")) == []


def test_a_directory_that_can_no_longer_be_written(tier, tmp_path, monkeypatch):
    kept = put(tier, "x")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "read-only file system")

    real_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *a, **kw: refuse() if flags & os.O_CREAT else real_open(path, flags, *a, **kw)
    )
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(TierFailed) as caught:
        put(tier, "y")
    assert caught.value.reason == "io"
    with pytest.raises(TierFailed):
        tier.delete(kept.extent_id)
    assert read_wrongly(tier, kept) == []
    assert tier.used_bytes() == bytes_of_files(tmp_path) == kept.size_bytes


def test_an_index_that_fails_does_not_cost_the_extent(tier, tmp_path):
    tier._index._db.executescript("DROP TABLE extents")
    info = put(tier, "x")
    assert read_wrongly(tier, info) == []
    tier, extents, _ = reopened(tier, tmp_path)
    assert extents == [info]
    tier.close()


class Hang:
    """Stands in for a system call that does not come back before it is let go."""

    def __init__(self, real):
        self.real, self.go, self.calls = real, threading.Event(), 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        self.go.wait()
        return self.real(*args, **kwargs)

    def catches(self, attempt):
        """Make an attempt that is given up in the call; again if it was given up before, as on a busy machine."""
        before = self.calls
        while self.calls == before:
            assert reason_of_giving_up(attempt) == "deadline"


def reason_of_giving_up(attempt):
    with pytest.raises((BlockMissing, TierFailed)) as caught:
        attempt()
    return caught.value.reason


@contextmanager
def hanging(call, threads):
    """Let a call of `os` hang, and only meanwhile and in these threads a deadline be short. Then wait for their end."""
    hang = Hang(getattr(os, call))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, hang)
        patch.setattr(threads, "_deadline_s", SOON_S)
        try:
            yield hang
        finally:
            hang.go.set()
        wait_until(lambda: threads.lost == 0)


def wait_until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_without_memory_to_read_into_a_block_is_missing_and_without_memory_to_write_a_tier_has_failed(
    tier, monkeypatch
):
    info = put(tier, "x")
    with monkeypatch.context() as patch:

        def none(size):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        patch.setattr(extent_reader, "io_buffer", none)
        tier._opener._buffers.clear()
        with tier.reader(info.extent_id) as reader, pytest.raises(BlockMissing) as missing:
            reader.read(0, [0], [memoryview(bytearray(SEGMENTS[0]))])
        assert missing.value.reason == "memory"

        def exhausted(**_):
            raise MemoryError

        patch.setattr(extent_writer, "write_extent", exhausted)
        with pytest.raises(TierFailed) as failed:
            put(tier, "y")
        assert failed.value.reason == "memory"
    assert read_wrongly(tier, info) == []
    assert read_wrongly(tier, put(tier, "y")) == []


def test_a_hung_read_fails_in_time_and_never_touches_memory_that_was_given_back(tier):
    info = put(tier, "x")
    out = bytearray(SEGMENTS[0])
    reader = tier.reader(info.extent_id)

    def read():
        reader.read(0, [0], [memoryview(out)])

    with hanging("preadv", tier._reads) as hang:
        hang.catches(read)
        assert reason_of_giving_up(read) == "deadline"  # without trying
        assert hang.calls == 1
        reader.close()
        assert tier._reads.lost == 1
    assert out == bytes(SEGMENTS[0])
    assert read_wrongly(tier, info) == []


def test_a_disk_that_does_not_answer_is_logged_once_in_a_while(tier, caplog):
    info = put(tier, "x")

    reader = tier.reader(info.extent_id)
    with hanging("preadv", tier._reads) as hang:
        hang.catches(lambda: reader.read(0, [0], [memoryview(bytearray(SEGMENTS[0]))]))
        other = tier.reader(info.extent_id)
        hang.catches(lambda: other.read(0, [0], [memoryview(bytearray(SEGMENTS[0]))]))
    (said,) = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert f"{info.extent_id:016x}: " in said
    reader.close()
    other.close()


def test_an_extent_that_cannot_be_opened_in_time_is_logged(tier, caplog):
    info = put(tier, "x")
    with hanging("fstat", tier._reads) as hang:
        hang.catches(lambda: tier.reader(info.extent_id))
    assert [record for record in caplog.records if "cannot be read" in record.getMessage()]


def test_when_a_layer_of_several_extents_hangs_all_are_closed_by_who_hangs(tier):
    readers = [tier.reader(put(tier, name).extent_id) for name in "xy"]
    descriptors = [reader._fd for reader in readers]
    out = memoryview(bytearray(2 * SEGMENTS[0]))

    def land():
        readers[0].land(0, [(reader, [1]) for reader in readers], [out], all_the_rest)

    with hanging("preadv", tier._reads) as hang:
        hang.catches(land)
        assert reason_of_giving_up(land) == "deadline"  # without trying
        assert hang.calls == 1
        for reader in readers:
            reader.close()
        assert all(os.fstat(fd) for fd in descriptors)
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_when_all_threads_hang_nothing_is_read_until_one_comes_back(tier, tmp_path):
    info = put(tier, "x")
    readers = [tier.reader(info.extent_id) for _ in range(READ_THREADS)]
    threads_before = threading.active_count()
    with hanging("preadv", tier._reads) as hang:
        for reader in readers:
            hang.catches(partial(reader.read, 0, [0], [memoryview(bytearray(SEGMENTS[0]))]))
        started = time.monotonic()
        for _ in range(100):
            assert reason_of_giving_up(lambda: tier.reader(info.extent_id)) == "deadline"
        assert time.monotonic() - started < 50 * SOON_S, "not even half of them has waited"
        assert threading.active_count() == threads_before
    assert read_wrongly(tier, info) == []
    assert tier.used_bytes() == bytes_of_files(tmp_path)


def test_a_write_that_ends_too_late_leaves_nothing(tier, tmp_path):
    with hanging("rename", tier._writes) as hang:
        hang.catches(lambda: put(tier, "x"))
        wait_until(lambda: tier._writes.lost == 1)
        assert tier.used_bytes() == bytes_of_files(tmp_path) > 0
    assert (tier.used_bytes(), record_files(tmp_path)) == (0, [])
    tier, extents, sessions = reopened(tier, tmp_path)
    assert (extents, sessions) == ([], [])
    tier.close()


def test_writes_that_hang_take_no_thread_from_reads(tier, tmp_path):
    info = put(tier, "x")
    with hanging("fdatasync", tier._writes) as hang:
        for _ in range(WRITE_THREADS):
            hang.catches(lambda: put(tier, "y"))
        for _ in range(READ_THREADS):
            assert reason_of_giving_up(lambda: put(tier, "y")) == "deadline"  # without trying
        assert hang.calls == WRITE_THREADS
        assert read_wrongly(tier, info) == []
    assert tier.used_bytes() == bytes_of_files(tmp_path)


def test_a_slow_write_that_goes_on_is_not_a_hung_one(tmp_path, monkeypatch):
    monkeypatch.setattr(extent_file, "CHUNK_BYTES", 4096)
    pwritev = os.pwritev

    def slow(fd, data, offset):
        time.sleep(0.02)
        return pwritev(fd, data, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    tier = make_tier(tmp_path, deadline_s=1.0)
    tier.open()
    started = time.monotonic()
    info = put(tier, "x", 24)
    assert time.monotonic() - started > 1.0
    assert read_wrongly(tier, info) == []
    tier.close()


def test_a_close_does_not_wait_for_what_hangs_for_ever(tier):
    info = put(tier, "x")
    io = tier._reads
    with tier.reader(info.extent_id) as reader, hanging("preadv", io) as hang:
        hang.catches(partial(reader.read, 0, [0], [memoryview(bytearray(SEGMENTS[0]))]))
        tier.close()
    assert reason_of_giving_up(lambda: tier.reader(info.extent_id)) == "io"


@pytest.mark.parametrize("deleted", ["kv", f"kv/{FINGERPRINT.hex()}", f"kv/{FINGERPRINT.hex()}/index.sqlite"])
def test_a_directory_that_is_deleted_is_made_again(tier, tmp_path, deleted, caplog):
    lost = put(tier, "lost")
    path = tmp_path / deleted
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    kept = put(tier, "kept", 2)
    assert "was deleted" in caplog.text
    assert read_wrongly(tier, kept) == []
    if path.is_dir():
        assert reason_of(tier, lost) == "missing"
        assert tier.used_bytes() == bytes_of_files(tmp_path) == kept.size_bytes
    with pytest.raises(DirectoryLocked):
        make_tier(tmp_path).open()
    tier.put_session(make_session("later"))
    tier.delete(lost.extent_id)
    tier, extents, sessions = reopened(tier, tmp_path)
    assert [info.extent_id for info in extents] == [kept.extent_id]
    assert {session.session_id for session in sessions} == {"s", "later"}
    tier.close()


def test_another_servers_directory_is_not_written_to(tier, tmp_path):
    put(tier, "lost")
    shutil.rmtree(tmp_path / "kv")
    other = make_tier(tmp_path)
    other.open()
    theirs = put(other, "theirs")
    with pytest.raises(TierFailed, match="is in use by"):
        put(tier, "mine")
    with pytest.raises(TierFailed, match="is in use by"):
        tier.put_session(make_session("mine"))
    assert [path.stem for path in record_files(tmp_path)] == [f"{theirs.extent_id:016x}"]
    other.close()
    mine = put(tier, "mine")
    assert read_wrongly(tier, mine) == []


def test_damage_is_told_once(tier, tmp_path, caplog):
    info = put(tier, "x")
    path = file_of(tmp_path, info)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 4096)
        file.write(b"damage")
    assert {reason_of(tier, info) for _ in range(3)} == {"checksum"}
    assert caplog.text.count("is damaged") == 1


def test_an_error_of_the_device_is_no_damage_and_hides_none(tier, tmp_path, monkeypatch, caplog):
    info = put(tier, "x")

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert {reason_of(tier, info) for _ in range(3)} == {"io"}
    assert (caplog.text.count("a stored record cannot be read"), "damaged" in caplog.text) == (1, False)
    assert read_wrongly(tier, info) == []
    with file_of(tmp_path, info).open("r+b") as file:
        file.truncate(8192)
    assert reason_of(tier, info) == "short_read"
    assert caplog.text.count("is damaged") == 1


def test_a_file_that_is_gone_is_no_damage(tier, tmp_path, caplog):
    info = put(tier, "x")
    file_of(tmp_path, info).unlink()
    assert {reason_of(tier, info) for _ in range(3)} == {"missing"}
    assert (caplog.text.count("a stored record is gone"), "damaged" in caplog.text) == (1, False)


def test_a_full_disk_says_by_how_much(tmp_path):
    tier = make_tier(tmp_path, capacity_bytes=1 << 40, min_free_bytes=1 << 60)
    tier.open()
    with pytest.raises(TierFull, match=r"^\d+ bytes: \d+ below the file system's floor$"):
        put(tier, "x")
    tier.close()


def test_of_deletions_that_stop_half_way_the_index_forgets_those_that_were_made(tier, monkeypatch):
    extents = [put(tier, name) for name in "abc"]
    remove = disk.remove_extent

    def failing(path):
        if path.endswith(f"{extents[1].extent_id:016x}.kv"):
            raise OSError(errno.EIO, "cannot")
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove_extent", failing)
        with pytest.raises(TierFailed):
            tier.delete(*(extent.extent_id for extent in extents))
    with tier._index._lock, tier._index._connection() as db:
        named = {row[0] for row in db.execute("SELECT extent_id FROM extents")}
    assert named == {extents[1].extent_id, extents[2].extent_id}
    tier.delete(*(extent.extent_id for extent in extents))
    assert tier.used_bytes() == 0


@pytest.mark.parametrize(
    ("linked", "is_running"), [("shards", False), ("shards", True), ("the model's directory", False)]
)
def test_links_are_not_followed(tier, tmp_path, linked, is_running, caplog):
    kept = put(tier, "kept")
    if not is_running:
        tier.close()
    own = tmp_path / "kv" / FINGERPRINT.hex()
    theirs = tmp_path / "somebody else's"
    theirs.mkdir()
    for place in sorted(own.glob("??")) if linked == "shards" else [own]:
        # As if by mv and ln -s: where the link leads, there is what was here.
        place.rename(theirs / place.name)
        place.symlink_to(theirs / place.name, target_is_directory=True)

    def records():
        return {path: path.stat().st_mtime_ns for path in theirs.rglob("*.kv")}

    before = records()
    if is_running:
        assert reason_of(tier, kept) == "io"
    else:
        tier, extents, _ = reopened(tier, tmp_path)
        assert extents == []
    stored = put(tier, "new")
    tier.delete(kept.extent_id)
    assert read_wrongly(tier, stored) == []
    assert records() == before
    assert "not followed" in caplog.text
    tier, extents, _ = reopened(tier, tmp_path)
    assert extents == [stored]
    tier.close()
