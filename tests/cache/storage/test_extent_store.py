import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reprise
import reprise.cache.storage.extent_file as extent_file
from reprise.cache.storage.directory import stored_models
from reprise.cache.storage.directory_lock import DirectoryLocked, used_by
from reprise.cache.storage.errors import BlockMissing, TierFailed, TierFull
from reprise.cache.storage.extent_format import SegmentSizes, checksum
from reprise.cache.storage.throttle import CREDIT_S, Throttle
from tests.cache.storage.disk_helpers import (
    FINGERPRINT,
    RECORD_KEY,
    SEGMENTS,
    all_the_rest,
    by_layer,
    bytes_of_files,
    checksums_of,
    file_of,
    make_blocks,
    make_session,
    make_tier,
    put,
    read_wrongly,
    reason_of,
    record_files,
    reopened,
    segment_bytes_of,
)
from tests.example_counts import examples


@settings(max_examples=examples(30))
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
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: pwrite(fd, parts[0][:777], offset))
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
            reader.read(1, [0, 2], [memoryview(bytearray(SEGMENTS[1])) for _ in range(2)])
    assert caught.value.reason == "checksum"
    assert [block for block in range(3) if caught.value.concerns(info.extent_id, block)] == [2]
    assert not caught.value.concerns(info.extent_id + 1, 2)


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
        assert reader.checksums(3, blocks[3].key) == tuple(checksum(layer[3]) for layer in data)
        for nowhere in (-1, 5):
            with pytest.raises(BlockMissing, match="no such block"):
                reader.checksums(nowhere, blocks[0].key)
        with pytest.raises(BlockMissing, match="no such block"):
            reader.checksums(3, blocks[2].key)
        reader.tell_altered(1, 2)
        assert "layer 1, block 2" in caplog.text
        os.truncate(file_of(tmp_path, info), info.size_bytes - 4096)
        with pytest.raises(BlockMissing) as caught:
            reader.land(1, [(reader, order)], [out], all_the_rest)
        assert caught.value.reason == "short_read"
    tier.close()


def test_a_cap_is_waited_for_behind_every_part_and_in_no_io_thread(tier):
    info = put(tier, "x")
    now_s, sleepers = [0.0], []

    def sleep(seconds):
        now_s[0] += seconds
        sleepers.append(threading.current_thread())

    tier._opener._throttle = Throttle(bytes_per_s=1e6, clock=lambda: now_s[0], sleep=sleep)
    with tier.reader(info.extent_id) as reader:
        outs = [memoryview(extent_file.io_buffer(1 << 20))[:size] for size in SEGMENTS]
        told = []
        for _ in range(10):
            assert reader.land(0, [(reader, [1])], outs, lambda count: told.append(count) or 1) == len(SEGMENTS)
        assert now_s[0] == pytest.approx(10 * sum(SEGMENTS) / 1e6 - CREDIT_S)
        assert set(sleepers) == {threading.current_thread()}
        assert told == [1] * 10 * (len(SEGMENTS) - 1)
        assert reader.land(0, [(reader, [1])], outs, lambda count: 0) == 1, "it is enough"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sizes", [(4096, 8192, 4096, 4096), (4096, 4000, 8, 4096)])
def test_layers_that_land_together(tmp_path, monkeypatch, direct, sizes):
    """One call reads all that lie side by side in the file and are wanted whole."""
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
            x.land(1, [(x, []), (y, [0, 1, 2])], wanted, all_the_rest)
        assert (caught.value.reason, caught.value.extent_id) == ("short_read", stored[1][0].extent_id)
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


def test_an_id_that_was_chosen_elsewhere_is_taken_once(tier):
    later = time.time_ns() + 10**12
    assert put(tier, "a", extent_id=later).extent_id == later
    assert not read_wrongly(tier, put(tier, "b", extent_id=later - 1))
    for taken in (later, later - 1, 0, 1 << 63):
        with pytest.raises(TierFailed, match="cannot be given"):
            put(tier, "c", extent_id=taken)
    assert put(tier, "d").extent_id > later


def test_everything_is_private_to_the_user(tier, tmp_path):
    put(tier, "x")
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


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


@settings(max_examples=examples(25))
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


def test_a_tool_finds_out_whose_records_they_are(tier, tmp_path):
    assert stored_models(tmp_path / "nothing", RECORD_KEY) == {}
    put(tier, "x")
    record_files(tmp_path)[0].write_bytes(b"spoilt")
    assert stored_models(tmp_path, RECORD_KEY) == {}
    put(tier, "y")
    assert stored_models(tmp_path, RECORD_KEY) == {FINGERPRINT: SegmentSizes(SEGMENTS)}


def test_a_second_server_is_told_who_is_there(tier, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.cache.storage.disk_helpers import make_tier\n"
        "from reprise.cache.storage.directory_lock import DirectoryLocked\n"
        "try: make_tier(Path(sys.argv[1])).open()\n"
        "except DirectoryLocked as locked: print(locked)"
    )
    root = Path(reprise.__file__).parents[1]
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
    tier.delete_sessions(("tenant", "", "s"))
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
    with pytest.raises(TierFailed, match="segment"):
        tier.write(make_session(), make_blocks("y"), bytes(72), lambda layer: [memoryview(b"short")])
    with pytest.raises(TierFailed, match="blocks"):
        tier.write(make_session(), [], b"", lambda layer: [])
    with pytest.raises(TierFailed, match="checksum"):
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


def test_many_sessions_are_deleted_for_little_more_than_one(tier, tmp_path, monkeypatch):
    """Waiting for the device is what costs."""
    extents = [put(tier, name=f"n{number}", session=make_session(f"s{number}")) for number in range(300)]
    synced = []
    monkeypatch.setattr("reprise.cache.storage.shards.sync_directory", synced.append)
    tier.delete(*(extent.extent_id for extent in extents))
    tier.delete_sessions(*(("tenant", "", f"s{number}") for number in range(300)))
    assert len(synced) <= 256
    assert len(set(synced)) == len(synced)
    assert not record_files(tmp_path)
    _, found, sessions = reopened(tier, tmp_path)
    assert not found
    assert not sessions
