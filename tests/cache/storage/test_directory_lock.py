"""Tests that only one server can use a directory."""

import pytest

from reprise.cache.storage.directory_lock import DirectoryLock, DirectoryLocked, used_by


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "kv").mkdir()
    return tmp_path


def test_it_says_who_holds_it_until_it_is_released(directory):
    one, other = DirectoryLock(directory, "one"), DirectoryLock(directory, "other")
    assert used_by(directory) is None
    one.take()
    assert (one.is_held, other.is_held, used_by(directory)) == (True, False, "one")
    with pytest.raises(DirectoryLocked, match="in use by one"):
        other.take()
    assert used_by(directory) == "one"
    one.release()
    other.take()
    assert (one.is_held, used_by(directory)) == (False, "other")
    other.release()


def test_a_deleted_file_is_no_lock_and_can_be_made_again(directory):
    lock = DirectoryLock(directory, "one")
    lock.take()
    (directory / "kv" / "lock").unlink()
    assert not lock.is_held
    lock.take()
    assert (lock.is_held, used_by(directory)) == (True, "one")
    lock.release()


def test_who_was_faster_keeps_it(directory):
    lock, other = DirectoryLock(directory, "one"), DirectoryLock(directory, "other")
    lock.take()
    (directory / "kv" / "lock").unlink()
    other.take()
    with pytest.raises(DirectoryLocked):
        lock.take()
    assert (lock.is_held, other.is_held) == (False, True)
    lock.release()
    other.release()
