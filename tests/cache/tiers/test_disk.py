import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache.tiers.extent_file as extent_file
from cache.extent import checksum
from cache.tiers.base import BlockMissing, TierFailed, TierFull
from cache.tiers.disk import READ_THREADS, WRITE_THREADS, DirectoryLocked, used_by
from cache.tiers.disk_files import stored_models
from tests.cache.tiers.disk_helpers import (
    FINGERPRINT,
    SEGMENTS,
    by_layer,
    bytes_of_files,
    checksums_of,
    make_blocks,
    make_session,
    make_tier,
    put,
    read_wrongly,
    record_files,
    segment_bytes_of,
)


@pytest.fixture
def tier(tmp_path):
    tier = make_tier(tmp_path)
    tier.open()
    yield tier
    tier.close()


def reopened(tier, directory, **changes):
    tier.close()
    tier = make_tier(directory, **changes)
    return (tier, *tier.open())


def file_of(directory, info):
    (path,) = (path for path in record_files(directory) if path.stem == f"{info.extent_id:016x}")
    return path


def reason_of(tier, info):
    with pytest.raises(BlockMissing) as caught:
        assert read_wrongly(tier, info) == []
    return caught.value.reason


@settings(max_examples=30)
@given(count=st.integers(1, 9), order=st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_any_blocks_in_any_order_come_back(tmp_path_factory, count, order):
    tier = make_tier(tmp_path_factory.mktemp("disk"))
    tier.open()
    info = put(tier, "x", count)
    assert read_wrongly(tier, info, [block % count for block in order]) == []
    tier.close()


def test_more_than_one_call_takes(tmp_path, monkeypatch):
    """Chunks of two blocks, short reads and short writes."""
    monkeypatch.setattr(extent_file, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(extent_file, "SYNC_BYTES", 10_000)
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:777]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:777], offset))
    tier = make_tier(tmp_path)
    tier.open()
    assert read_wrongly(tier, put(tier, "x", 7)) == []
    tier.close()


def test_bytes_that_changed_after_they_were_vouched_for_are_not_believed(tier):
    blocks = make_blocks("x")

    def segment(layer, block):
        return memoryview(segment_bytes_of(blocks[block].key, layer, SEGMENTS[layer]))

    def flipped(layer, block):
        data = bytearray(segment(layer, block))
        data[17] ^= (layer, block) == (1, 2)
        return memoryview(data)

    info = tier.write(make_session(), blocks, checksums_of(blocks, segment), by_layer(flipped, len(blocks)))
    with tier.reader(info.extent_id) as reader:
        reader.read(1, [0, 1], [memoryview(bytearray(SEGMENTS[1])) for _ in range(2)])
        with pytest.raises(BlockMissing) as caught:
            reader.read(1, [2], [memoryview(bytearray(SEGMENTS[1]))])
    assert caught.value.reason == "checksum"


@pytest.mark.parametrize("chunk", [4096, 12_288, 4 << 20])
def test_a_file_system_that_knows_no_direct_writes_gets_the_same_bytes(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(extent_file, "CHUNK_BYTES", chunk)
    files = []
    for direct in (True, False):
        if not direct:
            monkeypatch.setattr(extent_file, "_O_DIRECT", 0)
        monkeypatch.setattr(time, "time_ns", lambda: 1)  # the same id
        tier = make_tier(tmp_path / str(direct))
        tier.open()
        info = put(tier, "x", 5)
        assert read_wrongly(tier, info) == []
        files.append(file_of(tmp_path / str(direct), info).read_bytes())
        tier.close()
    assert files[0] == files[1]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, 8])
def test_segments_land_as_they_are_wherever_that_is(tmp_path, monkeypatch, caplog, direct, offset):
    """Whole pages, past the page cache where the file system can; else, and at odd addresses, as any other bytes."""
    if not direct:
        monkeypatch.setattr(extent_file, "_O_DIRECT", 0)
    sizes, blocks = (4096, 8192), make_blocks("x", 5)
    tier = make_tier(tmp_path, segment_bytes=sizes)
    tier.open()
    data = [[segment_bytes_of(block.key, layer, size) for block in blocks] for layer, size in enumerate(sizes)]
    sums = b"".join(checksum(segment) for layer in data for segment in layer)
    info = tier.write(make_session(), blocks, sums, lambda layer: [memoryview(segment) for segment in data[layer]])
    order = [4, 1, 2, 3, 0, 2]
    with tier.reader(info.extent_id) as reader, tier.reader(info.extent_id) as again:
        assert bool(fcntl.fcntl(reader._fd, fcntl.F_GETFL) & os.O_DIRECT) == direct
        for layer, size in enumerate(sizes):
            out = memoryview(extent_file.io_buffer(1 << 20))[offset:][: size * len(order)]
            reader.land(layer, [(reader, order[:4]), (again, order[4:])], [out], all_the_rest)
            assert bytes(out) == b"".join(data[layer][block] for block in order)
        assert reader.checksums(3) == tuple(checksum(layer[3]) for layer in data)
        for nowhere in (-1, 5):
            with pytest.raises(BlockMissing, match="no block"):
                reader.checksums(nowhere)
        reader.tell_altered(1, 2)
        assert "layer 1, block 2" in caplog.text
        os.truncate(file_of(tmp_path, info), info.size_bytes - 4096)
        with pytest.raises(BlockMissing) as caught:
            reader.land(1, [(reader, order)], [out], all_the_rest)
        assert caught.value.reason == "short_read"
    tier.close()


def test_a_cap_is_waited_for_behind_every_part_and_in_no_io_thread(tmp_path):
    tier = make_tier(tmp_path, read_bytes_per_s=1e6, deadline_s=0.1)
    tier.open()
    info = put(tier, "x")
    with tier.reader(info.extent_id) as reader:
        outs = [memoryview(extent_file.io_buffer(1 << 20))[:size] for size in SEGMENTS]
        told = []
        began = time.monotonic()
        for _ in range(1 + int(0.3e6 / sum(SEGMENTS))):
            assert reader.land(0, [(reader, [1])], outs, lambda count: told.append(count) or 1) == len(SEGMENTS)
        assert time.monotonic() - began > 0.2, "longer than the deadline"
        assert told[: len(SEGMENTS) - 1] == [1] * (len(SEGMENTS) - 1)
        assert reader.land(0, [(reader, [1])], outs, lambda count: 0) == 1, "it is enough"
    tier.close()


def all_the_rest(count):
    return 99


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sizes", [(4096, 8192, 4096, 4096), (4096, 4000, 8, 4096)])
def test_layers_that_land_together(tmp_path, monkeypatch, direct, sizes):
    """In one call as far as they lie side by side in the file and are wanted whole."""
    if not direct:
        monkeypatch.setattr(extent_file, "_O_DIRECT", 0)
    tier = make_tier(tmp_path, segment_bytes=sizes)
    tier.open()
    stored = []
    for name in "xy":
        blocks = make_blocks(name, 3)
        data = [[segment_bytes_of(block.key, layer, size) for block in blocks] for layer, size in enumerate(sizes)]
        sums = b"".join(checksum(segment) for layer in data for segment in layer)
        stored.append(
            (tier.write(make_session(), blocks, sums, lambda layer, data=data: map(memoryview, data[layer])), data)
        )
    calls, asked = [], []
    preadv, call = os.preadv, tier._reads.call
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: calls.append(len(parts)) or preadv(fd, parts, offset))
    monkeypatch.setattr(tier._reads, "call", lambda work, late: asked.append(None) or call(work, late))
    with tier.reader(stored[0][0].extent_id) as x, tier.reader(stored[1][0].extent_id) as y:
        calls.clear()
        for order in ([0, 1, 2], [2, 0]):
            outs = [memoryview(extent_file.io_buffer(1 << 20))[: size * (3 + len(order))] for size in sizes[1:]]
            asked.clear()
            assert x.land(1, [(x, [0, 1, 2]), (y, order)], outs, all_the_rest) == 3
            assert len(asked) == 1, "of an I/O thread"
            for layer, out in enumerate(outs, 1):
                first, second = (data[layer] for _, data in stored)
                assert bytes(out) == b"".join(first + [second[block] for block in order])
        if sizes[1] % 4096 == 0:
            # A layer, then both others: whole ones of each extent, and then of one every block by itself.
            assert calls == [1, 1, 2, 2] + [1, 1, 1] + [2] + [1] * 4
        os.truncate(file_of(tmp_path, stored[1][0]), stored[1][0].size_bytes - 4096)
        wanted = [out[: size * 3] for out, size in zip(outs, sizes[1:], strict=True)]
        with pytest.raises(BlockMissing) as caught:
            y.land(1, [(y, [0, 1, 2])], wanted, all_the_rest)
        assert caught.value.reason == "short_read"
        with pytest.raises(ValueError, match="as many bytes"):
            y.land(1, [(y, [0, 1])], wanted, all_the_rest)
    tier.close()


def test_a_read_of_several_parts_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:7]], offset))
    parts = [memoryview(bytearray(size)) for size in (10, 0, 5, 30)]
    fd = os.open(path, os.O_RDONLY)
    try:
        assert extent_file._read_all(fd, parts, 3) == 45
        assert b"".join(parts) == bytes(range(3, 48))
        assert extent_file._read_all(fd, parts, 90) == 10
    finally:
        os.close(fd)


def test_without_preadv(tier, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    assert read_wrongly(tier, put(tier, "x")) == []


def test_everything_is_private_to_the_user(tier, tmp_path):
    put(tier, "x")
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_restart_finds_extents_and_sessions(tier, tmp_path):
    infos = [put(tier, name, session=make_session(name)) for name in "abc"]
    tier.put_session(make_session("b", b"newer"))
    tier.put_session(make_session("d", b"no extent"))
    tier.delete_session("tenant", "", "c")
    tier, extents, sessions = reopened(tier, tmp_path)
    assert extents == infos
    assert {record.session_id: record.context for record in sessions} == {
        "a": b"context",
        "b": b"newer",
        "d": b"no extent",
    }
    assert all(read_wrongly(tier, info) == [] for info in extents)
    later = put(tier, "e", session=make_session("b", b"newest"))
    assert later.extent_id > infos[-1].extent_id
    tier, _, sessions = reopened(tier, tmp_path)
    assert next(record for record in sessions if record.session_id == "b").context == b"newest"
    tier.close()


@pytest.mark.parametrize("index_is_lost", [False, True])
def test_a_session_is_not_there_before_its_first_turn_has_ended(tier, tmp_path, index_is_lost):
    """An extent may be: when slots are scarce, blocks of running turns are written."""
    infos = [put(tier, "x", session=make_session("a", b"")), put(tier, "y", session=make_session("b"))]
    infos.append(put(tier, "z", session=make_session("b", b"")))
    if index_is_lost:
        tier.close()
        (index,) = tmp_path.glob("kv/*/index.sqlite")
        index.unlink()
    tier, extents, sessions = reopened(tier, tmp_path)
    assert extents == infos
    assert [(record.session_id, record.context) for record in sessions] == [("b", b"context")]
    tier.close()


@pytest.mark.parametrize("damage", ["delete", "garbage", "truncate", "flip", "directory", "other_schema"])
def test_the_index_is_made_again_from_the_records(tier, tmp_path, damage):
    infos = [put(tier, str(i), session=make_session("s", b"%d" % i)) for i in range(20)]
    tier.close()
    (index,) = tmp_path.glob("kv/*/index.sqlite")
    data = bytearray(index.read_bytes())
    if damage in {"delete", "directory"}:
        index.unlink()
    if damage == "directory":
        index.mkdir()
    elif damage == "garbage":
        index.write_bytes(b"garbage" * 1000)
    elif damage == "truncate":
        index.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        for position in range(5000, len(data), 97):
            data[position] ^= 0xFF
        index.write_bytes(data)
    elif damage == "other_schema":
        subprocess.run([sys.executable, "-c", "import sqlite3,sys;sqlite3.connect(sys.argv[1]).execute("
                        "'PRAGMA user_version=99')", str(index)], check=True)  # fmt: skip
    for _ in range(2):  # the second time from the new index
        tier, extents, sessions = reopened(tier, tmp_path)
        assert extents == infos
        assert [record.context for record in sessions] == [b"19"]
        assert all(read_wrongly(tier, info) == [] for info in extents)
    tier.close()


def test_a_start_with_an_index_reads_no_header(tier, tmp_path, monkeypatch):
    infos = [put(tier, name) for name in "ab"]
    tier.close()
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("a record was read"))
    tier, extents, _ = reopened(tier, tmp_path)
    assert extents == infos
    tier.close()


@pytest.mark.parametrize("index", ["kept", "deleted"])
def test_every_flipped_byte_is_seen_or_harmless(tier, tmp_path, index):
    info = put(tier, "x", 2)
    path = file_of(tmp_path, info)
    good = path.read_bytes()
    seen = {}
    for position in range(0, len(good), 31):
        data = bytearray(good)
        data[position] ^= 0x40
        path.write_bytes(data)
        try:
            assert read_wrongly(tier, info) == []
            assert good[position] == 0  # the gap behind a layer: nobody's bytes
        except BlockMissing as missing:
            seen[position] = missing.reason
    assert all(reason == ("format" if position < 12 else "checksum") for position, reason in seen.items())
    assert len(seen) > 0.7 * len(good) / 31
    data = bytearray(good)
    data[100] ^= 1
    path.write_bytes(data)
    if index == "deleted":
        tier.close()
        for file in tmp_path.glob("kv/*/index*"):
            file.unlink()
        tier, extents, _ = reopened(tier, tmp_path)
        assert (extents, record_files(tmp_path), tier.used_bytes()) == ([], [], 0)
        tier.close()
    else:
        assert [problem.split(":")[0] for _, problem in tier.verify()] == ["checksum"]


def test_a_flipped_row_of_the_index_is_not_believed(tier, tmp_path):
    info = put(tier, "x", session=make_session("s", b"a context that can be found"))
    tier.close()
    (index,) = tmp_path.glob("kv/*/index.sqlite")
    data = index.read_bytes()
    assert data.count(b"that can be found") == 2  # the extent's row and the session's
    index.write_bytes(data.replace(b"that can be found", b"that can be wrong"))
    tier, extents, sessions = reopened(tier, tmp_path)
    assert extents == [info]
    assert sessions == [info.session]
    tier.close()


def test_a_file_cut_anywhere(tier, tmp_path):
    info = put(tier, "x", 2)
    path = file_of(tmp_path, info)
    good = path.read_bytes()
    for length in [*range(0, len(good), 997), 1, 23, 24, 4095, 4096, len(good) - 1]:
        path.write_bytes(good[:length])
        assert reason_of(tier, info) == "short_read"
    path.write_bytes(good + b"x")
    assert reason_of(tier, info) == "format"
    with_reader = good
    path.write_bytes(with_reader)
    with tier.reader(info.extent_id) as reader:  # cut while it is open
        os.truncate(path, len(good) - 9000)
        with pytest.raises(BlockMissing) as caught:
            reader.read(2, [0, 1], [memoryview(bytearray(SEGMENTS[2])) for _ in range(2)])
    assert caught.value.reason == "short_read"


def test_a_record_in_the_place_of_another(tier, tmp_path):
    one, other = put(tier, "x"), put(tier, "y")
    assert read_wrongly(tier, one) == []
    shutil.copy(file_of(tmp_path, other), file_of(tmp_path, one))
    assert reason_of(tier, one) == "format"
    file_of(tmp_path, one).unlink()
    assert reason_of(tier, one) == "missing"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "fifo").rename(
        tmp_path / "kv" / tier._own.name / f"{one.extent_id:016x}"[-2:] / f"{one.extent_id:016x}.kv"
    )
    assert reason_of(tier, one) == "format"
    file_of(tmp_path, other).unlink()
    file_of(tmp_path, one).unlink()
    tier, extents, _ = reopened(tier, tmp_path)
    assert (extents, tier.used_bytes()) == ([], 0)
    tier.close()


def test_another_models_record_is_not_read(tier, tmp_path):
    info = put(tier, "x")
    other = make_tier(tmp_path / "other", fingerprint=b"another model")
    other.open()
    shutil.copy(file_of(tmp_path / "other", put(other, "x")), file_of(tmp_path, info))
    other.close()
    assert reason_of(tier, info) == "fingerprint"


def test_another_fingerprint_is_left_alone_until_its_room_is_needed(tier, tmp_path):
    old = [put(tier, name) for name in "ab"]
    size = old[0].size_bytes
    tier, extents, _ = reopened(tier, tmp_path, fingerprint=b"another", capacity_bytes=4 * size)
    assert (extents, tier.used_bytes()) == ([], 2 * size)
    put(tier, "c")
    put(tier, "d")
    tier, extents, _ = reopened(tier, tmp_path, capacity_bytes=4 * size)
    assert extents == old  # a start by mistake cost nothing
    tier, *_ = reopened(tier, tmp_path, fingerprint=b"another", capacity_bytes=4 * size)
    put(tier, "e")  # takes the room of the oldest foreign one
    assert tier.used_bytes() == bytes_of_files(tmp_path) == 4 * size
    tier, extents, _ = reopened(tier, tmp_path, capacity_bytes=3 * size)
    assert extents == old[1:]
    assert tier.used_bytes() == bytes_of_files(tmp_path) == 3 * size
    tier.close()


def test_the_cap_is_exact(tmp_path):
    probe = make_tier(tmp_path / "probe")
    probe.open()
    size = put(probe, "x").size_bytes
    probe.close()
    tier = make_tier(tmp_path, capacity_bytes=2 * size)
    tier.open()
    first = put(tier, "a")
    put(tier, "b")
    for count in (3, 1, 50):  # 50: alone larger than the cap
        with pytest.raises(TierFull):
            put(tier, "c", count)
    tier.delete(first.extent_id)
    tier.delete(first.extent_id)
    tier.delete(12345)
    put(tier, "d")
    assert tier.used_bytes() == bytes_of_files(tmp_path / "kv" / "..") == 2 * size
    tier.close()


def test_the_file_systems_floor(tmp_path):
    status = os.statvfs(tmp_path)
    tier = make_tier(tmp_path, min_free_bytes=status.f_blocks * status.f_frsize)
    tier.open()
    with pytest.raises(TierFull, match="floor"):
        put(tier, "x")
    assert tier.used_bytes() == bytes_of_files(tmp_path) == 0
    tier.close()


WRITES = st.tuples(st.just("write"), st.integers(1, 6))
DELETES = st.tuples(st.just("delete"), st.integers(0, 9))
REOPENS = st.sampled_from([("reopen", 0), ("reopen without index", 0)])


@settings(max_examples=25)
@given(steps=st.lists(WRITES | DELETES | REOPENS, max_size=14))
def test_used_bytes_are_the_files_whatever_happens(tmp_path_factory, steps):
    directory = tmp_path_factory.mktemp("disk")
    tier = make_tier(directory, capacity_bytes=200_000)
    tier.open()
    here = []
    for number, (what, argument) in enumerate(steps):
        if what == "write":
            try:
                here.append(put(tier, str(number), argument))
            except TierFull:
                assert tier.used_bytes() + argument * sum(SEGMENTS) + 4096 > 200_000 - 4 * 4096
        elif what == "delete" and here:
            tier.delete(here.pop(argument % len(here)).extent_id)
        elif what.startswith("reopen"):
            tier.close()
            if "without" in what:
                for file in directory.glob("kv/*/index*"):
                    file.unlink()
            tier = make_tier(directory, capacity_bytes=200_000)
            extents, _ = tier.open()
            assert extents == here
        assert tier.used_bytes() == bytes_of_files(directory) == sum(info.size_bytes for info in here)
        assert tier.used_bytes() <= 200_000
    tier.close()


class Crash(BaseException):
    """The process is gone: nothing after it runs."""


@pytest.mark.parametrize("call", ["open", "pwrite", "fdatasync", "rename", "fsync"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_between_any_two_steps_of_a_write(tier, tmp_path, monkeypatch, call, when):
    kept = put(tier, "kept")
    real = getattr(os, call)

    def dying(*args, **kwargs):
        if call == "fsync" and len(list(tmp_path.glob("kv/*/*/*.kv"))) == 1:
            return real(*args, **kwargs)  # of a new directory, before the file
        if when == "after":
            real(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, call, dying)
        patch.setattr(os, "unlink", lambda *_: None)  # a dead process tidies nothing
        with pytest.raises(Crash):
            put(tier, "lost")
    tier, extents, _ = reopened(tier, tmp_path)
    renamed = call == "fsync" or (call, when) == ("rename", "after")
    assert len(extents) == (2 if renamed else 1)
    assert extents[0] == kept
    assert all(read_wrongly(tier, info) == [] for info in extents)
    assert tier.used_bytes() == bytes_of_files(tmp_path)
    tier.close()


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "rename"])
@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.ENOSPC, TierFull), (errno.EDQUOT, TierFull), (errno.EIO, TierFailed), (errno.EROFS, TierFailed)],
)
def test_a_write_that_fails_leaves_nothing(tier, tmp_path, monkeypatch, call, code, expected):
    def failing(*_):
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
        os, "open", lambda path, flags, *mode: refuse() if flags & os.O_CREAT else real_open(path, flags, *mode)
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

    def __call__(self, *args):
        self.calls += 1
        self.go.wait()
        return self.real(*args)


def wait_until(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_hung_read_fails_in_time_and_never_touches_memory_that_was_given_back(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, deadline_s=0.3)
    tier.open()
    info = put(tier, "x")
    out = bytearray(SEGMENTS[0])
    reader = tier.reader(info.extent_id)
    hang = Hang(os.preadv)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hang)
        for _ in range(2):  # the second fails without trying
            with pytest.raises(BlockMissing) as caught:
                reader.read(0, [0], [memoryview(out)])
            assert caught.value.reason == "deadline"
        assert hang.calls == 1
        reader.close()
        assert tier._reads.lost == 1
        hang.go.set()
        wait_until(lambda: tier._reads.lost == 0)
    assert out == bytes(SEGMENTS[0])
    assert read_wrongly(tier, info) == []
    tier.close()


def test_when_a_layer_of_several_extents_hangs_all_are_closed_by_who_hangs(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, deadline_s=0.3)
    tier.open()
    readers = [tier.reader(put(tier, name).extent_id) for name in "xy"]
    descriptors = [reader._fd for reader in readers]
    out = memoryview(bytearray(2 * SEGMENTS[0]))
    hang = Hang(os.preadv)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hang)
        for _ in range(2):  # the second fails without trying
            with pytest.raises(BlockMissing) as caught:
                readers[0].land(0, [(reader, [1]) for reader in readers], [out], all_the_rest)
            assert caught.value.reason == "deadline"
        assert hang.calls == 1
        for reader in readers:
            reader.close()
        assert all(os.fstat(fd) for fd in descriptors)
        hang.go.set()
        wait_until(lambda: tier._reads.lost == 0)
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    tier.close()


def test_when_all_threads_hang_nothing_is_read_until_one_comes_back(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, deadline_s=0.3)
    tier.open()
    info = put(tier, "x")
    readers = [tier.reader(info.extent_id) for _ in range(READ_THREADS)]
    hang = Hang(os.preadv)
    threads_before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hang)
        for reader in readers:
            with pytest.raises(BlockMissing):
                reader.read(0, [0], [memoryview(bytearray(SEGMENTS[0]))])
        started = time.monotonic()
        for _ in range(100):
            with pytest.raises(BlockMissing) as missing:
                tier.reader(info.extent_id)
            assert missing.value.reason == "deadline"
        assert time.monotonic() - started < 2  # 100 deadlines would be five seconds
        assert threading.active_count() == threads_before
        hang.go.set()
        wait_until(lambda: tier._reads.lost == 0)
    assert read_wrongly(tier, info) == []
    assert tier.used_bytes() == bytes_of_files(tmp_path)
    tier.close()


def test_a_write_that_ends_too_late_leaves_nothing(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, deadline_s=0.3)
    tier.open()
    hang = Hang(os.rename)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", hang)
        with pytest.raises(TierFailed) as caught:
            put(tier, "x")
        assert caught.value.reason == "deadline"
        assert tier.used_bytes() == bytes_of_files(tmp_path) > 0
        hang.go.set()
        wait_until(lambda: tier._writes.lost == 0)
    assert (tier.used_bytes(), record_files(tmp_path)) == (0, [])
    tier, extents, sessions = reopened(tier, tmp_path)
    assert (extents, sessions) == ([], [])
    tier.close()


def test_writes_that_hang_take_no_thread_from_reads(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, deadline_s=0.3)
    tier.open()
    info = put(tier, "x")
    hang = Hang(os.fdatasync)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", hang)
        for _ in range(READ_THREADS + WRITE_THREADS):  # more than there are: the last fail without trying
            with pytest.raises(TierFailed) as caught:
                put(tier, "y")
            assert caught.value.reason == "deadline"
        assert hang.calls == WRITE_THREADS
        assert read_wrongly(tier, info) == []
        hang.go.set()
        wait_until(lambda: tier._writes.lost == 0)
    assert tier.used_bytes() == bytes_of_files(tmp_path)
    tier.close()


def test_a_slow_write_that_goes_on_is_not_a_hung_one(tmp_path, monkeypatch):
    monkeypatch.setattr(extent_file, "CHUNK_BYTES", 4096)
    pwrite = os.pwrite

    def slow(fd, data, offset):
        time.sleep(0.02)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    tier = make_tier(tmp_path, deadline_s=0.3)
    tier.open()
    started = time.monotonic()
    info = put(tier, "x", 6)
    assert time.monotonic() - started > 0.3
    assert read_wrongly(tier, info) == []
    tier.close()


def test_a_close_does_not_wait_for_what_hangs_for_ever(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, deadline_s=0.5)
    tier.open()
    info = put(tier, "x")
    hang = Hang(os.preadv)
    with monkeypatch.context() as patch, tier.reader(info.extent_id) as reader:
        patch.setattr(os, "preadv", hang)
        with pytest.raises(BlockMissing):
            reader.read(0, [0], [memoryview(bytearray(SEGMENTS[0]))])
        io = tier._reads
        tier.close()
        hang.go.set()
        wait_until(lambda: io.lost == 0)
    with pytest.raises(BlockMissing):
        tier.reader(info.extent_id)


def test_a_tool_finds_out_whose_records_they_are(tier, tmp_path):
    assert stored_models(tmp_path / "nothing") == {}
    put(tier, "x")
    record_files(tmp_path)[0].write_bytes(b"spoilt")
    assert stored_models(tmp_path) == {}
    put(tier, "y")
    assert stored_models(tmp_path) == {FINGERPRINT: SEGMENTS}


def test_a_second_server_is_told_who_is_there(tier, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.cache.tiers.disk_helpers import make_tier\n"
        "from cache.tiers.disk import DirectoryLocked\n"
        "try: make_tier(Path(sys.argv[1])).open()\n"
        "except DirectoryLocked as locked: print(locked)"
    )
    root = Path(extent_file.__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert f"pid {os.getpid()}" in told.stdout
    assert str(tmp_path) in told.stdout
    with pytest.raises(DirectoryLocked):
        make_tier(tmp_path).open()
    assert used_by(tmp_path) == f"a running server (pid {os.getpid()})"
    tier.close()
    assert used_by(tmp_path) is None
    assert used_by(tmp_path / "nothing") is None
    again = make_tier(tmp_path)
    again.open()
    again.close()


def test_a_reader_outlives_its_extent(tier):
    info = put(tier, "x")
    out = bytearray(SEGMENTS[1])
    with tier.reader(info.extent_id) as reader:
        tier.delete(info.extent_id)
        reader.read(1, [2], [memoryview(out)])
    assert bytes(out) != bytes(SEGMENTS[1])
    assert reason_of(tier, info) == "missing"


def test_readers_writers_and_deletes_at_once(tier, tmp_path):
    stop, problems, lock, here, reasons = time.monotonic() + 1.5, [], threading.Lock(), [], set()

    def work(number):
        try:
            count = 0
            while time.monotonic() < stop:
                count += 1
                info = put(tier, f"{number}/{count}", 1 + count % 4)
                with lock:
                    here.append(info)
                    other = here[(count * 7) % len(here)]
                try:
                    assert read_wrongly(tier, other) == []
                except BlockMissing as missing:
                    reasons.add(missing.reason)
                if count % 3 == 0:
                    with lock:
                        gone = here.pop(count % len(here))
                    tier.delete(gone.extent_id)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert reasons <= {"missing"}
    assert len(here) > 5
    assert tier.used_bytes() == bytes_of_files(tmp_path) == sum(info.size_bytes for info in here)
    assert all(problem is None for _, problem in tier.verify())


def test_deleted_bytes_are_gone_from_the_index_too(tier, tmp_path):
    secret = b"a secret of the conversation"
    info = put(tier, "x", session=make_session("s", secret))
    tier.put_session(make_session("s", secret * 2))
    tier.delete(info.extent_id)
    tier.delete_session("tenant", "", "s")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or secret not in path.read_bytes(), path


def test_caps_hold_for_reads_and_writes(tmp_path):
    tier = make_tier(tmp_path, read_bytes_per_s=500_000, write_bytes_per_s=400_000)
    tier.open()
    started = time.monotonic()
    info = put(tier, "x", 6)
    assert time.monotonic() - started >= info.size_bytes / 400_000 - 0.02
    started = time.monotonic()
    assert read_wrongly(tier, info) == []
    assert time.monotonic() - started >= 6 * sum(SEGMENTS) / 500_000 - 0.02
    tier.close()


def test_arguments_that_make_no_sense_are_refused(tier):
    info = put(tier, "x")
    with pytest.raises(ValueError, match="segment"):
        tier.write(make_session(), make_blocks("y"), bytes(72), lambda layer: [memoryview(b"short")])
    with pytest.raises(ValueError, match="blocks"):
        tier.write(make_session(), [], b"", lambda layer: [])
    with pytest.raises(ValueError, match="checksum"):
        tier.write(make_session(), make_blocks("y"), bytes(71), lambda layer: [memoryview(bytes(3 * SEGMENTS[layer]))])
    with tier.reader(info.extent_id) as reader:
        with pytest.raises(ValueError, match="block"):
            reader.read(0, [3], [memoryview(bytearray(SEGMENTS[0]))])
        with pytest.raises(ValueError, match="buffer"):
            reader.read(0, [0], [memoryview(bytearray(5))])
    with pytest.raises(TierFailed):
        make_tier(Path("unused")).write(
            make_session(), make_blocks("y", 1), bytes(24), lambda layer: [memoryview(bytes(SEGMENTS[layer]))]
        )


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


def test_a_full_disk_says_by_how_much(tmp_path):
    tier = make_tier(tmp_path, capacity_bytes=1 << 40, min_free_bytes=1 << 60)
    tier.open()
    with pytest.raises(TierFull, match=r"^\d+ bytes: \d+ below the file system's floor$"):
        put(tier, "x")
    tier.close()
