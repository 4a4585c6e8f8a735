"""Tests the disk tier's accounting, without files."""

import os

import pytest

from reprise.cache.storage.directory import Foreign
from reprise.cache.storage.errors import TierFull
from reprise.cache.storage.space import DiskSpace


@pytest.fixture
def space(tmp_path):
    return DiskSpace(root=tmp_path, own=tmp_path / "own", capacity_bytes=100, min_free_bytes=0)


def foreign(root, extent_id, size):
    path = root / "ff" / f"{extent_id:02x}" / f"{extent_id:016x}.kv"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))
    return Foreign(extent_id, path, size)


def test_what_is_being_written_counts_and_a_failure_gives_it_back(space):
    space.reserve(60)
    with pytest.raises(TierFull, match="20 over the cap"):
        space.reserve(60)
    space.settle(1, 60, stored=False, stays=False)
    assert (space.used_bytes, 1 in space) == (0, False)
    space.reserve(60)
    space.settle(2, 60, stored=True, stays=True)
    assert (space.used_bytes, space.extent_ids()) == (60, [2])
    space.release(2, 3)
    space.release(2)
    assert (space.used_bytes, 2 in space) == (0, False)


def test_what_cannot_be_removed_takes_its_room(space):
    space.reserve(60)
    space.settle(1, 60, stored=False, stays=True)
    assert (space.used_bytes, 1 in space) == (60, False)


def test_the_oldest_of_the_others_records_leaves_first(space, tmp_path):
    others = [foreign(tmp_path, extent_id, 30) for extent_id in (5, 3, 4)]
    space.open({1: 10}, others, lambda: None)
    space.reserve(20)
    assert [record.path.exists() for record in others] == [True, False, True]
    assert space.used_bytes == 90
    with pytest.raises(TierFull):
        space.reserve(101)  # nobody leaves for what never fits
    assert others[2].path.exists()


def test_others_leave_while_all_are_more_than_the_cap(space, tmp_path):
    others = [foreign(tmp_path, extent_id, 30) for extent_id in (3, 4)]
    space.open({1: 60}, others, lambda: None)
    assert [record.path.exists() for record in others] == [False, True]
    assert space.used_bytes == 90


def test_the_floor_counts_what_the_file_system_has_not_been_asked_for(tmp_path, monkeypatch):
    space = DiskSpace(root=tmp_path, own=tmp_path / "own", capacity_bytes=1000, min_free_bytes=50)
    status = os.statvfs_result((1, 1, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    space.reserve(40)
    with pytest.raises(TierFull, match="10 below the file system's floor"):
        space.reserve(20)
    space.settle(1, 40, stored=True, stays=True)  # from now on the file system knows
    space.reserve(20)
