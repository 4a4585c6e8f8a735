"""Tests by which moment the prefetch timer begins a load."""

from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.car.timer import due


def loads(*seconds):
    return list(enumerate(seconds))


def test_a_load_starts_when_the_next_end_is_no_farther_than_its_length():
    assert due([2.0, 5.0], 0.0, loads(1.9)) == []
    assert due([2.0, 5.0], 0.0, loads(2.0)) == [0]


def test_the_next_load_waits_for_the_second_end_and_the_load_ahead():
    assert due([2.0, 5.0], 0.0, loads(2.0, 2.9)) == [0]
    assert due([2.0, 5.0], 0.0, loads(2.0, 3.0)) == [0, 1]
    assert due([2.0, 5.0], 1.0, loads(1.0)) == [0], "what is under way goes first"
    assert due([2.0, 5.0], 0.0, loads(None, 4.9)) == [], "one with nothing to load takes the first place"


def test_an_empty_batch_loads_at_once():
    assert due([0.0, 0.0], 0.0, loads(0.0, 1.0, 1.0)) == [0, 1]
    assert due([], 0.0, loads(1.0)) == [], "no end will make a place"


@given(
    ends=st.lists(st.floats(0, 100), max_size=6).map(sorted),
    loading=st.floats(0, 10),
    waiting=st.lists(st.none() | st.floats(0, 50), max_size=8),
)
def test_loading_longer_never_starts_later(ends, loading, waiting):
    now = set(due(ends, loading, loads(*waiting)))
    slower = set(due(ends, loading, loads(*(None if s is None else 2 * s for s in waiting))))
    sooner = set(due([s / 2 for s in ends], loading, loads(*waiting)))
    assert now <= slower
    assert now <= sooner


@given(
    ends=st.lists(st.floats(0, 100), max_size=6).map(sorted),
    waiting=st.lists(st.none() | st.floats(0, 50), max_size=8),
)
def test_no_load_starts_that_would_end_before_its_place_is_free(ends, waiting):
    """All loads together, up to a request's own, take at least until its place is free; and no other load waits."""
    started, total_s = due(ends, 0.0, loads(*waiting)), 0.0
    for place, load_s in enumerate(waiting[: len(ends)]):
        total_s += load_s or 0.0
        assert (place in started) == (load_s is not None and ends[place] <= total_s)
