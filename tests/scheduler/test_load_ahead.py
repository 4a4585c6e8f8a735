"""Tests that the head of the line gets its pages before a place is free, so that its KV loads while others run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import examples
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
    for name in "abcdef":
        loop.add(name, 5)
    loop.step()
    assert set(loop.cache.held) == {"a"}, "pages that wait for nothing are of more use to others"
    for name in "bcdef":
        loop.cache.to_load[name] = 400
    for _ in range(5):  # each step looks at one of them again
        loop.step()
    assert set(loop.cache.held) == {"a", "b", "c", "d", "e"}, "the first four that wait"


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


def test_a_later_arrival_that_is_due_first_keeps_its_pages_when_room_is_short():
    loop = make_loop(policy="due", room=40, max_seqs=1)
    for name in ("long", "short"):
        loop.cache.resident[name], loop.cache.to_load[name] = 4, 400
    running = loop.add("running", 6, max_tokens=30)
    loop.step()
    loop.add("long", 20, arrived_s=1.0)  # 16 tokens are missing
    loop.step()
    loop.add("short", 6, arrived_s=1.1)  # 2 are
    loop.step()
    loop.step()  # its load under way, it is due first
    assert loop.upcoming == ["short", "long"]
    assert set(loop.cache.held) == {"running", "long", "short"}
    while "long" in loop.cache.held and "short" in loop.cache.held:
        loop.step()
        assert running.output_tokens < 30, "room is never short"
    assert set(loop.cache.held) == {"running", "short"}, "what comes last gives its pages back first"


@pytest.mark.parametrize("chunked", [True, False])
@settings(max_examples=examples(200))
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
