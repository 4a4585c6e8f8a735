"""Tests that a move ends when all ranks have ended it, in any order, and that the worst of their reports counts."""

import random

from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import ExtentInfo, SessionRecord
from reprise.cache.moves import (
    BlockLoad,
    Deleted,
    DeleteExtents,
    Event,
    Fetched,
    LoadBlocks,
    Loaded,
    Lost,
    NotTransferred,
    Saved,
    Transferred,
    WriteExtent,
    Written,
)
from reprise.engine.ranks.joined_events import JoinedEvents

KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]
SESSION = SessionRecord(tenant="t", salt="", session_id="s", context=b"", last_used_s=0.0, pinned=False, ttl_s=None)
WRITE = WriteExtent(job_id=5, session=SESSION, blocks=(), slots=(1, 2))


def load(job_id: int) -> LoadBlocks:
    blocks = [BlockLoad(key, 32, number, None, number, 0, 32 * number) for number, key in enumerate(KEYS)]
    return LoadBlocks(job_id, "request", tuple(blocks))


def extent(size_bytes: int) -> ExtentInfo:
    return ExtentInfo(extent_id=77, session=SESSION, blocks=(), size_bytes=size_bytes)


@given(num_ranks=st.integers(2, 4), seed=st.integers(0, 1000), count=st.integers(1, 12))
def test_each_move_ends_once_and_last(num_ranks: int, seed: int, count: int) -> None:
    chance = random.Random(seed)
    joined = JoinedEvents(num_ranks)
    waiting = [(rank, ticket) for rank in range(num_ranks) for ticket in range(count)]
    chance.shuffle(waiting)
    told = dict.fromkeys(range(count), 0)
    ended: list[Event] = []
    for rank, ticket in waiting:
        told[ticket] += 1
        found = joined.add(rank, [Saved(ticket)])
        assert found == ([Saved(ticket)] if told[ticket] == num_ranks else [])
        ended += found
    assert sorted(event.ticket for event in ended if isinstance(event, Saved)) == list(range(count))
    assert not joined._answers


PART = st.one_of(
    st.just(({}, frozenset())),
    st.tuples(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(["late", "checksum"]), min_size=1),
              st.frozensets(st.sampled_from(KEYS))),
)  # fmt: skip


@given(parts=st.lists(PART, min_size=2, max_size=4))
def test_of_a_load_only_what_is_whole_everywhere_is_used(parts: list) -> None:
    joined = JoinedEvents(len(parts))
    joined.note([load(3)])
    events: list[Event] = []
    for rank, (failed, whole) in enumerate(parts):
        assert not events
        events = joined.add(rank, [Loaded(3, failed, whole.difference(failed))])
        assert joined.has_told(3) == (rank < len(parts) - 1)
    (event,) = events
    assert isinstance(event, Loaded)
    assert event.failed.keys() == set().union(*(failed for failed, _ in parts))
    for key, reason in event.failed.items():
        reasons = {failed[key] for failed, _ in parts if key in failed}
        assert reason == ("checksum" if "checksum" in reasons else "late")
    usable = event.whole if event.failed else set(KEYS)
    assert (
        usable
        == {key for key in KEYS if all(not failed or key in whole - failed.keys() for failed, whole in parts)}
        - event.failed.keys()
    )


def test_rank_0_writes_first_and_chooses_the_id() -> None:
    joined = JoinedEvents(3)
    joined.note([WRITE])
    assert joined.add(0, [Written(5, extent(100), None)]) == []
    (order,) = joined.for_others
    assert isinstance(order, WriteExtent)
    assert (order.job_id, order.extent_id, order.slots) == (5, 77, (1, 2))
    assert joined.add(1, [Written(5, extent(101), None)]) == []
    (event,) = joined.add(2, [Written(5, extent(102), None)])
    assert isinstance(event, Written)
    assert event.extent is not None
    assert event.extent.size_bytes == 303
    assert not joined.for_all


def test_an_extent_that_one_rank_could_not_write_is_deleted_everywhere() -> None:
    joined = JoinedEvents(2)
    joined.note([WRITE])
    joined.add(0, [Written(5, extent(100), None)])
    assert joined.add(1, [Written(5, None, "full")]) == [Written(5, None, "full")]
    (order,) = joined.for_all
    assert isinstance(order, DeleteExtents)
    assert order.extent_ids == (77,)
    assert order.job_id < 0
    assert joined.add(0, [Deleted(order.job_id)]) == joined.add(1, [Deleted(order.job_id, "io")]) == []


def test_what_rank_0_could_not_write_nobody_is_asked_to() -> None:
    joined = JoinedEvents(2)
    joined.note([WRITE])
    assert joined.add(0, [Written(5, None, "full")]) == [Written(5, None, "full")]
    assert not joined.for_others
    assert not joined._answers


def test_bytes_are_those_of_all_ranks_and_trouble_that_of_any() -> None:
    joined = JoinedEvents(2)
    moved = Transferred("dram_to_hbm", 10, 0.5)
    assert joined.add(0, [moved]) == [Transferred("dram_to_hbm", 20, 0.5)]
    assert joined.add(1, [moved]) == []
    assert joined.add(1, [NotTransferred("disk_to_hbm", 10, 1.0)]) == [NotTransferred("disk_to_hbm", 20, 1.0)]
    assert joined.add(1, [Fetched(8, {KEYS[0]: "io"})]) == []
    assert joined.add(0, [Fetched(8)]) == [Fetched(8, {KEYS[0]: "io"})]
    assert joined.add(0, [Deleted(9, "busy")]) == []
    assert joined.add(1, [Deleted(9)]) == [Deleted(9, "busy")]
    assert joined.add(1, [Lost((4,))]) == [Lost((4,))]
    assert [move.extent_ids for move in joined.for_all if isinstance(move, DeleteExtents)] == [(4,)]
