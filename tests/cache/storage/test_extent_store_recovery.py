"""Tests what a start finds, with or without the index: intact records, damaged ones, and those of other models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.cache.storage.errors import BlockMissing
from tests.cache.storage.disk_helpers import (
    SEGMENTS,
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


def test_a_restart_finds_extents_and_sessions(tier, tmp_path):
    infos = [put(tier, name, session=make_session(name)) for name in "abc"]
    tier.put_session(make_session("b", b"newer"))
    tier.put_session(make_session("d", b"no extent"))
    tier.delete_sessions(("tenant", "", "c"))
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


# A process that may write no byte to any file is on a full disk, as far as the tier can tell.
ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.cache.storage.disk_helpers import make_tier

resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
tier = make_tier(Path(sys.argv[1]))
extents, sessions = tier.open()
print(len(extents), sorted((record.session_id, record.context) for record in sessions))
tier.close()
"""


def test_a_start_on_a_full_disk_leaves_the_index_alone(tier, tmp_path):
    put(tier, "a", session=make_session("a"))
    tier.put_session(make_session("b", b"nowhere else"))
    tier.close()
    command = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    root = Path(__file__).parents[3]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told == "1 [('a', b'context'), ('b', b'nowhere else')]\n"
    assert not list(tmp_path.glob("kv/*/*.bad"))
    assert len(reopened(tier, tmp_path)[2]) == 2


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
            assert good[position] == 0  # the gap after a layer, which belongs to no block
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
        assert [problem.reason for _, problem in tier.verify()] == ["checksum"]


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
        tmp_path / "kv" / tier._shards.own.name / f"{one.extent_id:016x}"[-2:] / f"{one.extent_id:016x}.kv"
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


def test_the_last_record_of_a_fingerprint_takes_its_directory_along(tier, tmp_path):
    old = [put(tier, name) for name in "ab"]
    size = old[0].size_bytes
    directory = tier._shards.own
    tier, *_ = reopened(tier, tmp_path, fingerprint=b"another", capacity_bytes=2 * size)
    put(tier, "c")
    assert directory.is_dir()
    put(tier, "d")
    assert not directory.exists()
    assert tier.used_bytes() == bytes_of_files(tmp_path) == 2 * size
    tier.close()


def test_a_directory_of_records_that_is_taken_away_is_made_again(tier, tmp_path):
    before = sorted(tier._shards.own.glob("??"))
    assert len(before) == 256
    for directory in before:
        directory.rmdir()
    info = put(tier, "x")
    assert read_wrongly(tier, info) == []
    assert sorted(tier._shards.own.glob("??")) == before
