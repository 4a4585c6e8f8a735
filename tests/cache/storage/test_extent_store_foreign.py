"""Tests foreign files in the disk tier's directory: forged records are misses, and no file ends a server."""

import os
import shutil
import sqlite3
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.storage import extent_store, extent_writer
from reprise.cache.storage.errors import TierFailed
from reprise.cache.storage.extent_format import FORMAT_VERSION, MAX_EXTENT_ID
from tests.cache.storage.disk_helpers import (
    FINGERPRINT,
    bytes_of_files,
    file_of,
    forge,
    make_session,
    make_tier,
    put,
    read_wrongly,
    reason_of,
    record_files,
    reopened,
)
from tests.example_counts import examples


def swap(one, other):
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap_and_rehash(tmp_path, one, other):
    """Each has the other's bytes after a header that names its own id, all hashes without a key made anew."""
    swap(file_of(tmp_path, one), file_of(tmp_path, other))
    for info in (one, other):
        forge(file_of(tmp_path, info), lambda header, to=info.extent_id: replace(header, extent_id=to))


@pytest.mark.parametrize("when", ["between reads", "between starts", "with the index lost"])
def test_swapped_records_whose_hashes_were_made_anew_are_not_read(tier, tmp_path, when):
    one, other = put(tier, "x"), put(tier, "y")
    if when != "between reads":
        tier.close()
    swap_and_rehash(tmp_path, one, other)
    if when == "with the index lost":
        for file in tmp_path.glob("kv/*/index*"):
            file.unlink()
    if when != "between reads":
        tier = make_tier(tmp_path)
        extents, _ = tier.open()
        assert extents == ([one, other] if when == "between starts" else [])
    expected = "missing" if when == "with the index lost" else "forged"
    assert [reason_of(tier, info) for info in (one, other)] == [expected] * 2
    tier.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda header: replace(header, blocks=header.blocks[::-1]),
        lambda header: replace(header, checksums=bytes(len(header.checksums))),
        lambda header: replace(header, session=make_session("another's")),
        lambda header: header,
    ],
)
def test_a_header_with_the_right_hash_and_a_guessed_key_is_forged(tier, tmp_path, change):
    info = put(tier, "x")
    forge(file_of(tmp_path, info), change)
    assert reason_of(tier, info) == "forged"
    assert [problem.reason for _, problem in tier.verify()] == ["forged"]


def test_forged_records_stay_until_their_room_is_needed(tier, tmp_path):
    """A start with another secret by mistake costs nothing."""
    infos = [put(tier, name) for name in "ab"]
    size = infos[0].size_bytes
    tier, extents, _ = reopened(tier, tmp_path, key=b"another secret's", capacity_bytes=3 * size)
    assert (extents, sorted(tier.useless), tier.used_bytes()) == ([], [info.extent_id for info in infos], 2 * size)
    third = put(tier, "c")
    assert tier.used_bytes() == bytes_of_files(tmp_path) == 3 * size
    tier, extents, _ = reopened(tier, tmp_path, capacity_bytes=3 * size)
    assert extents == infos
    put(tier, "d")  # takes the room of the one that was written with another secret
    assert (tier.used_bytes(), file_of(tmp_path, infos[0]).exists()) == (3 * size, True)
    assert third.extent_id not in {int(path.stem, 16) for path in record_files(tmp_path)}
    assert tier._shards.own.is_dir()
    assert len(list(tier._shards.own.glob("??"))) == 256
    tier.close()


def test_rows_of_the_index_that_somebody_else_wrote_are_not_believed(tier, tmp_path):
    """They would name blocks in the wrong place, or sessions that never were."""
    one, other = put(tier, "x", session=make_session("x")), put(tier, "y", session=make_session("y"))
    tier.close()
    (index,) = tmp_path.glob("kv/*/index.sqlite")
    with sqlite3.connect(index) as db:
        wrong = msgspec.msgpack.encode(replace(one, blocks=other.blocks))
        db.execute("UPDATE extents SET info = ? WHERE extent_id = ?", (wrong, one.extent_id))
        forged = msgspec.msgpack.encode(make_session("x", b"wrong"))
        db.execute("UPDATE sessions SET record = ?, stamp = ? WHERE session_id = 'x'", (forged, 1 << 61))
        macs = dict(db.execute("SELECT session_id, mac FROM sessions"))
        db.execute("UPDATE sessions SET mac = ?, stamp = ? WHERE session_id = 'y'", (macs["x"], (1 << 63) - 1))
    tier = make_tier(tmp_path)
    extents, sessions = tier.open()
    assert extents == [one, other]
    assert [record.context for record in sessions if record.session_id == "x"] == [b"context"]
    assert read_wrongly(tier, put(tier, "z")) == []
    tier.close()


def test_a_record_of_an_older_format_is_a_miss_and_swept(tier, tmp_path):
    info, kept = put(tier, "x"), put(tier, "y")
    path = file_of(tmp_path, info)
    data = bytearray(path.read_bytes())
    data[8:12] = (FORMAT_VERSION - 1).to_bytes(4, "little")
    path.write_bytes(data)
    assert reason_of(tier, info) == "format"
    tier.close()
    for file in tmp_path.glob("kv/*/index*"):
        file.unlink()
    tier = make_tier(tmp_path)
    assert tier.open()[0] == [kept]
    assert record_files(tmp_path) == [file_of(tmp_path, kept)]
    tier.close()


HIGHEST = f"{MAX_EXTENT_ID:016x}"


@pytest.mark.parametrize("fingerprint", [FINGERPRINT, b"another model"])
def test_an_empty_file_with_the_highest_id_leaves_ids_for_ours(tmp_path, fingerprint):
    shard = tmp_path / "kv" / fingerprint.hex() / "ff"
    shard.mkdir(parents=True)
    (shard / f"{HIGHEST}.kv").touch()
    tier = make_tier(tmp_path)
    tier.open()
    infos = [put(tier, name) for name in "ab"]
    tier, extents, _ = reopened(tier, tmp_path)
    assert extents == infos
    assert all(read_wrongly(tier, info) == [] for info in infos)
    tier.close()


def test_what_no_record_can_hold_is_not_written_and_ends_nobody(tier, monkeypatch):
    monkeypatch.setattr(extent_writer, "encode_header", lambda *_: (_ for _ in ()).throw(ValueError("too large")))
    with pytest.raises(TierFailed, match="too large"):
        put(tier, "x")
    monkeypatch.undo()
    monkeypatch.setattr(extent_store.time, "time_ns", lambda: MAX_EXTENT_ID + 1)
    for write in (lambda: put(tier, "x"), lambda: tier.put_session(make_session())):
        with pytest.raises(TierFailed, match="no extent ids are left"):
            write()
    assert tier.used_bytes() == 0


IDS = st.sampled_from([0, 1, MAX_EXTENT_ID - 1, MAX_EXTENT_ID, MAX_EXTENT_ID + 1, (1 << 64) - 1]) | st.integers(
    0, (1 << 64) - 1
)
SHARDED = IDS.map(lambda number: (f"{number:016x}"[-2:], f"{number:016x}.kv"))
NAMES = st.one_of(
    SHARDED,
    SHARDED.map(lambda found: (found[0], found[1].replace(".kv", ".tmp"))),
    SHARDED.map(lambda found: ("00", found[1])),
    st.tuples(st.sampled_from(["00", "ff", "zz", "7f"]), st.text("0123456789abcdefkvtmp.é\n", min_size=1, max_size=30)),
).filter(lambda name: name[1].strip(".") and "/" not in name[1])
CONTENTS = st.one_of(
    st.just(b""),
    st.binary(max_size=100),
    st.sampled_from([b"REPRISEK", b"REPRISEK\x02\0\0\0\xff\xff\xff\xff", b"REPRISEK\x01\0\0\0" + bytes(4096)]),
    st.sampled_from(["directory", "fifo", "dangling", "loop", "record", "forged"]),
)


@settings(deadline=None, max_examples=examples(60))
@given(files=st.lists(st.tuples(st.booleans(), NAMES, CONTENTS), min_size=1, max_size=6), lost=st.booleans())
def test_no_file_in_the_directory_ends_a_server_or_hides_a_record(tmp_path_factory, files, lost):
    directory = tmp_path_factory.mktemp("disk")
    tier = make_tier(directory)
    tier.open()
    ours = put(tier, "ours")
    tier.close()
    record = file_of(directory, ours)
    for is_own, (shard, name), content in files:
        folder = directory / "kv" / (FINGERPRINT if is_own else b"another model").hex() / shard
        folder.mkdir(parents=True, exist_ok=True)
        place(folder / name, content, record)
    if lost:
        for file in directory.glob("kv/*/index*"):
            file.unlink()
    for number in range(2):
        tier = make_tier(directory)
        extents, _ = tier.open()
        assert ours in extents
        written = put(tier, f"new {number}")
        for info in (ours, written):
            assert read_wrongly(tier, info) == []
        assert len([None for _, problem in tier.verify() if problem is None]) == 2 + number
        tier.close()
    shutil.rmtree(directory)


def place(path, content, record):
    if os.path.lexists(path):
        return
    match content:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "dangling":
            path.symlink_to("nothing")
        case "loop":
            path.symlink_to(path.name)
        case "record":
            shutil.copy(record, path)
        case "forged":
            shutil.copy(record, path)
            named = int(path.stem, 16) if len(path.stem) == 16 and path.suffix == ".kv" else 1
            forge(path, lambda header: replace(header, extent_id=min(max(named, 1), MAX_EXTENT_ID)))
        case bytes():
            path.write_bytes(content)
