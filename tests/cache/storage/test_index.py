"""Tests that extents' rows are written in batches, and that every request to the index sees the waiting rows."""

import sqlite3

import pytest

from reprise.cache.blocks.stored import ExtentInfo
from reprise.cache.storage.index import _EXTENTS_PER_BATCH, DiskIndex
from tests.cache.storage.disk_helpers import RECORD_KEY, make_blocks, make_session


@pytest.fixture
def index(tmp_path):
    index = DiskIndex(path=tmp_path / "index.sqlite", key=RECORD_KEY)
    index.open(lambda: None)
    yield index
    index.close()


def extent(number, session="s", context=b"context"):
    return ExtentInfo(number, make_session(session, context), tuple(make_blocks(str(number))), 4096)


def add(index, *numbers, **kwargs):
    for number in numbers:
        index.add(extent(number, **kwargs), stamp=number)


def rows(tmp_path, table="extents"):
    """Return the rows that another connection sees: those that are written."""
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def reopened(index):
    index.close()
    return index.open(lambda: None)


def test_rows_are_written_together(index, tmp_path):
    add(index, *range(1, _EXTENTS_PER_BATCH))
    assert rows(tmp_path) == 0
    add(index, _EXTENTS_PER_BATCH)
    assert rows(tmp_path) == _EXTENTS_PER_BATCH
    assert rows(tmp_path, "sessions") == 1
    add(index, _EXTENTS_PER_BATCH + 1)
    assert rows(tmp_path) == _EXTENTS_PER_BATCH
    extents, sessions = reopened(index)
    assert extents == {number: extent(number) for number in range(1, _EXTENTS_PER_BATCH + 2)}
    assert sessions == {("tenant", "", "s"): (_EXTENTS_PER_BATCH + 1, make_session())}


def test_a_row_that_waits_can_be_removed(index):
    add(index, 1, 2, 3)
    index.remove([1, 3])
    extents, sessions = reopened(index)
    assert list(extents) == [2]
    assert sessions[("tenant", "", "s")][0] == 3  # the session is known as it was last


@pytest.mark.parametrize(("stamp", "wins"), [(5, b"by itself"), (3, b"context")])
def test_what_is_said_of_a_session_does_not_depend_on_who_waits(index, stamp, wins):
    add(index, 4)
    index.put_session(make_session(context=b"by itself"), stamp=stamp)
    assert reopened(index)[1][("tenant", "", "s")][1].context == wins


def test_a_deleted_session_does_not_come_back_with_a_row_that_waits(index, tmp_path):
    secret = b"nobody shall find this text"
    add(index, 1, context=secret)
    add(index, 2, session="other")
    index.remove([1])
    index.delete_sessions([("tenant", "", "s")])
    extents, sessions = reopened(index)
    assert list(extents) == [2]
    assert list(sessions) == [("tenant", "", "other")]
    assert not [path for path in tmp_path.iterdir() if secret in path.read_bytes()]


def test_an_index_that_is_made_again_is_empty(index):
    add(index, 1)
    index.make_again(lambda: None)
    assert reopened(index) == ({}, {})


def test_who_closes_does_not_fail_because_of_rows_that_waited(index, tmp_path, caplog):
    add(index, 1)
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("DROP TABLE extents")
    index.close()
    assert "will be found by their headers" in caplog.text
