"""Tests how running requests get room, and how their loads are counted at the first chunk."""

import pytest

from reprise.scheduler.sequence import SequenceState
from tests.scheduler.test_load_ahead import a_full_house
from tests.scheduler.test_scheduler import make_loop


def test_the_latest_arrival_gives_way_and_stands_first_in_line_again():
    # 4 + 4 + 4 rows of 13: the first decode step fits for one of the three.
    loop = make_loop(room=13, max_seqs=3)
    a, b, c = (loop.add(name, 4, arrived_s=arrived) for name, arrived in (("a", 0.0), ("b", 1.0), ("c", 2.0)))
    loop.add("d", 4, arrived_s=3.0)
    loop.step()
    schedule = loop.schedule()
    assert [chunk.sequence for chunk in schedule.chunks] == [a, b]
    assert schedule.preempted == [c]
    assert (c.state, c.computed_tokens, c.preemptions) == (SequenceState.WAITING, 0, 1)
    assert loop.upcoming == ["c", "d"], "and its room is not given away in the same step"
    assert loop.scheduler.preemptions == 1
    assert c.token_ids == [0, 1, 2, 3, 0], "it keeps what it said"


def test_several_that_give_way_keep_their_order():
    loop = make_loop(room=12, max_seqs=3, step_tokens=100, lone_step_tokens=100)
    loop.add("a", 4, arrived_s=0.0)
    loop.add("b", 4, arrived_s=1.0)
    loop.add("c", 4, arrived_s=2.0)
    loop.step()
    loop.cache.room = 6
    schedule = loop.schedule()
    assert [chunk.sequence.request_id for chunk in schedule.chunks] == ["a"]
    assert [sequence.request_id for sequence in schedule.preempted] == ["c", "b"]
    assert loop.upcoming == ["b", "c"]


def test_a_chunk_already_given_to_the_one_that_gives_way_is_taken_back():
    # "late" was admitted first and so decodes first, but "early" (a resumed request) arrived before it.
    loop = make_loop(room=9)
    loop.add("late", 4, arrived_s=5.0)
    loop.step()
    loop.add("early", 4, arrived_s=0.0)
    assert loop.step() == [("late", 1), ("early", 4)]
    schedule = loop.schedule()
    assert [chunk.sequence.request_id for chunk in schedule.chunks] == ["early"]
    assert [sequence.request_id for sequence in schedule.preempted] == ["late"]


def test_a_prefill_that_cannot_grow_gives_way_itself_if_it_came_last():
    loop = make_loop(room=10, step_tokens=5, lone_step_tokens=5)
    loop.add("a", 4, arrived_s=0.0)
    loop.step()
    loop.add("b", 8, arrived_s=1.0)
    assert loop.step() == [("a", 1), ("b", 4)]
    assert loop.step() == [("a", 1)]
    assert loop.running == ["a"]
    assert loop.upcoming == ["b"]


def test_those_who_decode_do_not_wait_for_a_load_that_is_late():
    """Its load was nearly done when it joined, and then took longer."""
    loop = make_loop()
    loop.add("reader", 4)
    loop.step()
    loop.cache.stalls["loads"] = 0.5
    loop.add("loads", 8)
    assert loop.step() == [("reader", 1)]
    assert loop.running == ["reader", "loads"]
    assert loop.step() == [("reader", 1)]
    loop.cache.stalls["loads"] = 0.01  # within the budget of a stall
    assert loop.step() == [("reader", 1), ("loads", 8)]


@pytest.mark.parametrize(("stall_s", "outcome"), [(0.033, "hidden"), (0.036, "exposed")])
def test_a_load_counts_as_hidden_by_what_it_holds_up(stall_s, outcome):
    loop = a_full_house()
    loop.cache.stalls["a"] = stall_s
    loop.add("a", 8)  # 4 tokens to compute: 10 ms and 4 ms, and 20 ms are not minded
    loop.step()
    assert dict(loop.scheduler.loads) == {outcome: 1}


@pytest.mark.parametrize(("left_s", "outcome"), [(0.0, "finished"), (0.015, "hidden")])
def test_a_load_counts_by_what_is_left_of_it_when_its_request_computes(left_s, outcome):
    loop = a_full_house(max_seqs=2)
    loop.add("a", 8, max_tokens=9)
    loop.step()
    loop.cache.stalls["b"] = 0.5
    loop.add("b", 8)
    assert loop.step() == [("a", 1)], "it has its place, and holds up nobody"
    assert not loop.scheduler.loads
    loop.cache.stalls["b"] = left_s
    assert [name for name, _ in loop.step()] == ["a", "b"]
    assert dict(loop.scheduler.loads) == {outcome: 1}


def test_who_is_ahead_gives_way_to_who_runs():
    loop = a_full_house(room=12)
    loop.add("a", 5, max_tokens=6)
    second = loop.add("b", 6)
    loop.step()
    assert loop.cache.held == {"a": 5, "b": 6}
    for _ in range(3):
        assert loop.step() == [("a", 1)]
    assert loop.cache.held == {"a": 8}
    assert (second.computed_tokens, loop.scheduler.preemptions) == (0, 0), "nobody who runs was preempted for it"
    for _ in range(2):
        loop.step()
    assert loop.step() == [("b", 2)]


def test_nobody_is_preempted_for_room_that_comes_by_itself():
    loop = make_loop(room=12)
    loop.add("a", 6)
    loop.add("b", 6)
    assert loop.step() == [("a", 6), ("b", 6)]
    loop.cache.leaving = True
    assert loop.step() == []
    assert loop.running == ["a", "b"]
    loop.cache.leaving = False
    loop.step()
    assert loop.running == ["a"]
