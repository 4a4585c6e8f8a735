"""Tests the order of operations on the disk, and what each caller is told."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.stored import SessionRecord
from reprise.cache.moves import Deleted, DeleteExtents, PutSession
from reprise.cache.storage.errors import TierFailed
from reprise.cache.transfer import write_stream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.write_stream import WriteStream


def record(number):
    return SessionRecord("t", "", f"s{number}", b"context", 1.0, False, None)


class Disk:
    """Notes what is asked of it. Extents whose number is in `stuck` cannot be deleted."""

    def __init__(self, stuck=()):
        self.stuck, self.calls, self.gone, self.forgotten = set(stuck), [], [], []

    def delete(self, *extent_ids):
        self.calls.append("delete")
        for extent_id in extent_ids:
            if extent_id in self.stuck:
                raise TierFailed("cannot", reason="io")
            if extent_id not in self.gone:
                self.gone.append(extent_id)

    def take_lost(self):
        return []

    def delete_sessions(self, *names):
        self.calls.append("delete_sessions")
        self.forgotten += [name for _, _, name in names]

    def put_session(self, record):
        self.calls.append(record.session_id)


def run(disk, orders):
    completions = Events()
    stream = WriteStream(slab=SimpleNamespace(), disk=disk, completions=completions)
    for order in orders:
        stream.put(order)
    stream.close()
    stream.run()
    return completions.take()


def deletion(number, session=True):
    return DeleteExtents(number, (number,), ("t", "", f"s{number}") if session else None)


@given(
    kinds=st.lists(st.sampled_from(["delete", "delete", "evict", "put"]), max_size=12),
    stuck=st.sets(st.integers(0, 11), max_size=2),
    together=st.integers(1, 5),
)
def test_every_order_is_carried_out_in_its_turn_and_told_once(kinds, stuck, together):
    disk = Disk(stuck)
    orders = [PutSession(record(n)) if kind == "put" else deletion(n, kind == "delete") for n, kind in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_stream, "_DELETIONS_TOGETHER", together)
        events = run(disk, orders)
    deleted = [n for n, kind in enumerate(kinds) if kind != "put"]
    assert all(isinstance(event, Deleted) for event in events)
    assert [event.job_id for event in events] == deleted
    assert [event.problem is not None for event in events] == [n in stuck for n in deleted]
    assert disk.gone == [n for n in deleted if n not in stuck]
    # Whoever cannot be rid of its bytes is not forgotten; and nothing passes what was put in between.
    assert disk.forgotten == [f"s{n}" for n in deleted if n not in stuck and kinds[n] == "delete"]
    puts = [call for call in disk.calls if call.startswith("s")]
    assert puts == [f"s{n}" for n, kind in enumerate(kinds) if kind == "put"]


def test_deletions_that_stand_one_behind_the_other_are_one():
    disk = Disk()
    run(disk, [*map(deletion, range(100)), PutSession(record(7)), deletion(100)])
    one = ["delete", "delete_sessions"]
    assert disk.calls == [*one, *one, "s7", *one]  # 64 and 36
    assert disk.gone == [*range(101)]


def test_what_stands_between_deletions_is_not_passed():
    disk = Disk()
    run(disk, [deletion(1), PutSession(record(1)), deletion(2)])
    assert disk.calls == ["delete", "delete_sessions", "s1", "delete", "delete_sessions"]


def test_an_eviction_forgets_no_session():
    disk = Disk()
    run(disk, [deletion(1, session=False)])
    assert disk.calls == ["delete"]
