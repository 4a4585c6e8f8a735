"""Tests that the head of the line gets its pages before a place is free, so that its KV loads while others run."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.early_loads import AheadLoads
from tests.conftest import make_sequence
from tests.scheduler.test_scheduler import make_loop


def a_full_house(room: int = 10_000, max_seqs: int = 1):
    loop = make_loop(room=room, max_seqs=max_seqs)
    for name in "ab":
        loop.cache.resident[name], loop.cache.to_load[name] = 4, 400
    return loop


def test_the_next_one_loads_while_others_take_all_places():
    loop = a_full_house()
    first = loop.add("a", 5, max_tokens=3)
    second = loop.add("b", 8)
    assert loop.step() == [("a", 1)]
    assert set(loop.cache.held) == {"a", "b"}
    assert (loop.running, loop.upcoming) == (["a"], ["b"]), "it has its pages, but not its turn"
    assert second.computed_tokens == 4
    assert second.scheduled_s is None
    loop.step()
    loop.step()
    assert first.output_tokens == 3
    assert loop.step() == [("b", 4)]


def test_only_the_head_of_the_line_and_only_to_load():
    loop = a_full_house()
    loop.cache.to_load["b"] = 0
    for name in ("a", "b", "c"):
        loop.add(name, 5)
    loop.step()
    assert set(loop.cache.held) == {"a"}, "pages that wait for nothing are of more use to others"
    loop.cache.to_load["b"], loop.cache.to_load["c"] = 400, 400
    loop.step()
    loop.step()
    assert set(loop.cache.held) == {"a", "b"}


def test_while_a_place_is_free_nobody_is_ahead():
    loop = a_full_house(max_seqs=2)
    loop.add("a", 5)
    loop.cache.waiting_for_siblings.add("b")
    loop.add("b", 5)
    loop.step()
    assert set(loop.cache.held) == {"a"}
    loop.cache.waiting_for_siblings.clear()
    assert loop.step() == [("a", 1), ("b", 1)]


def test_a_load_does_not_wait_for_room_in_the_step():
    loop = a_full_house(max_seqs=2)
    loop.add("long", 100)
    second = loop.add("b", 8)
    assert loop.step() == [("long", 16)]
    assert set(loop.cache.held) == {"long", "b"}, "its place is free, and there is time to load"
    assert second.scheduled_s is None
    for _ in range(6):
        loop.step()
    assert loop.running == ["long", "b"]


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


def test_who_is_ahead_may_leave():
    loop = a_full_house()
    loop.add("a", 5)
    second = loop.add("b", 6)
    loop.step()
    loop.scheduler.remove(second)
    assert set(loop.cache.held) == {"a"}
    assert loop.step() == [("a", 1)]


def test_who_is_ahead_keeps_its_place_when_its_load_fails():
    loop = a_full_house()
    loop.add("a", 5, max_tokens=3)
    second = loop.add("b", 8)
    loop.add("c", 8)
    loop.step()
    assert second.computed_tokens == 4
    del loop.cache.held["b"]  # the cache has taken its pages
    loop.cache.resident["b"] = loop.cache.to_load["b"] = 0
    loop.scheduler.requeue(second)
    assert loop.upcoming == ["b", "c"]
    assert (second.computed_tokens, second.preemptions) == (0, 0)
    for _ in range(2):
        loop.step()
    assert loop.step() == [("b", 8)]


def test_one_who_is_put_before_it_takes_its_room():
    loop = a_full_house(room=10)
    first = loop.add("a", 5, max_tokens=9)
    loop.add("b", 5)
    loop.step()
    assert set(loop.cache.held) == {"a", "b"}
    loop.cache.preempt("a")
    loop.scheduler.requeue(first)
    loop.cache.resident["a"], loop.cache.to_load["a"] = 0, 0
    assert loop.step() == [("a", 6)]
    assert loop.running == ["a"]
    assert set(loop.cache.held) == {"a"}


class Clock:
    """A load that was started ahead, and when it ends."""

    def __init__(self, *, load_s, had_time=True):
        self.cache = SimpleNamespace(stall_s=self.stall_s)
        self.wrong = []
        forecast = SimpleNamespace(was_wrong=lambda early: self.wrong.append("early" if early else "late"))
        self.loads = AheadLoads(cache=self.cache, forecast=forecast)
        self.sequence = make_sequence("r", 4)
        self.now, self.ends_s = 0.0, load_s
        self.loads.begin(self.sequence, 0.0, had_time)

    def stall_s(self, request_id):
        return max(0.0, self.ends_s - self.now)

    def outcome(self, *, turn_s, step_s=0.01):
        """Its turn comes after so many seconds, in steps of so many."""
        started = False
        while not self.loads.outcomes:
            self.now += step_s
            self.loads.look(self.now)
            if not started and self.now >= turn_s - 1e-9:
                self.loads.start(self.sequence, self.now)
                started = True
        (outcome,) = self.loads.outcomes
        return outcome


@pytest.mark.parametrize(
    ("load_s", "turn_s", "outcome"),
    [
        (0.01, 0.06, "on_time"),  # idle for 50 ms
        (0.01, 0.08, "early"),
        (0.4, 0.49, "on_time"),  # a quarter of 400 ms is 100
        (0.4, 0.52, "early"),
        (0.4, 0.31, "on_time"),
        (0.4, 0.28, "late"),
        (0.1, 0.06, "on_time"),
        (0.1, 0.04, "late"),
    ],
)
def test_a_load_is_on_time_within_50_ms_or_a_quarter_of_itself(load_s, turn_s, outcome):
    clock = Clock(load_s=load_s)
    assert clock.outcome(turn_s=turn_s) == outcome
    assert clock.wrong == [outcome] * (outcome != "on_time")


def test_steps_are_longer_than_a_load_takes_and_do_not_make_it_look_late_or_early():
    # It ended 10 ms into a step of 200 ms: the turn came 190 ms behind it, and 190 ms ahead of one that has just begun.
    assert Clock(load_s=0.01).outcome(turn_s=0.2, step_s=0.2) == "early"
    assert Clock(load_s=0.19).outcome(turn_s=0.2, step_s=0.2) == "on_time"


def test_a_load_for_which_there_was_no_time_is_not_the_timers_fault():
    clock = Clock(load_s=0.4, had_time=False)
    assert clock.outcome(turn_s=0.1) == "at_once"
    assert not clock.wrong
    assert Clock(load_s=0.1, had_time=False).outcome(turn_s=0.4) == "early", "it could have waited"


def test_a_late_load_of_one_who_goes_away_does_not_count():
    clock = Clock(load_s=10.0)
    clock.now = 0.1
    clock.loads.start(clock.sequence, clock.now)
    clock.loads.stopped(clock.sequence)
    clock.now = 20.0
    clock.loads.look(clock.now)
    assert not clock.loads.outcomes


@pytest.mark.parametrize("chunked", [True, False])
@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=12),
    max_seqs=st.integers(1, 3),
    room=st.integers(50, 90),
)
def test_everybody_ends_in_order_of_arrival_with_all_room_given_back(chunked, lengths, max_seqs, room):
    loop = make_loop(room=room, max_seqs=max_seqs, chunked_prefill=chunked)
    sequences = []
    for number, (prompt, answer, stored) in enumerate(lengths):
        name = f"{number:02}"
        if stored:
            loop.cache.resident[name], loop.cache.to_load[name] = prompt - 1, 100
        sequences.append(loop.add(name, prompt, arrived_s=number, max_tokens=answer))
    for _ in range(2000):
        if not loop.scheduler.has_work():
            break
        loop.step()
    assert not loop.scheduler.has_work()
    assert not loop.cache.held
    starts = [sequence.scheduled_s for sequence in sequences]
    assert starts == sorted(starts)


def test_nobody_loads_ahead_into_the_room_that_the_first_in_line_waits_for():
    loop = make_loop(room=10, max_seqs=4)
    loop.cache.resident["c"], loop.cache.to_load["c"] = 2, 400
    loop.add("a", 5, max_tokens=3)
    loop.step()
    loop.add("big", 8)
    loop.add("c", 3)
    loop.step()
    assert set(loop.cache.held) == {"a"}
    for _ in range(3):
        loop.step()
    assert "big" in loop.running
