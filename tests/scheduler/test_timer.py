from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.timer import WaitingLoad, due


def loads(*seconds):
    return [WaitingLoad(str(place), load_s) for place, load_s in enumerate(seconds)]


def test_a_load_starts_when_the_next_end_is_no_farther_than_its_length():
    assert due([5.0, 2.0], 0, 0.0, loads(1.9)) == []
    assert due([5.0, 2.0], 0, 0.0, loads(2.0)) == ["0"]


def test_the_one_behind_waits_for_the_second_end_and_the_load_ahead():
    assert due([5.0, 2.0], 0, 0.0, loads(2.0, 2.9)) == ["0"]
    assert due([5.0, 2.0], 0, 0.0, loads(2.0, 3.0)) == ["0", "1"]
    assert due([5.0, 2.0], 0, 1.0, loads(1.0)) == ["0"], "what is under way goes first"
    assert due([5.0, 2.0], 0, 0.0, loads(None, 4.9)) == [], "one with nothing to load takes the first place"


def test_an_empty_batch_loads_at_once():
    assert due([], 2, 0.0, loads(0.0, 1.0, 1.0)) == ["0", "1"]
    assert due([], 0, 0.0, loads(1.0)) == [], "nobody's end will make a place"


@given(
    running=st.lists(st.floats(0, 100), max_size=6),
    queued=st.floats(0, 10),
    waiting=st.lists(st.none() | st.floats(0, 50), max_size=8),
)
def test_loading_longer_never_starts_later(running, queued, waiting):
    now = set(due(running, 0, queued, loads(*waiting)))
    slower = set(due(running, 0, queued, loads(*(None if s is None else 2 * s for s in waiting))))
    sooner = set(due([s / 2 for s in running], 0, queued, loads(*waiting)))
    assert now <= slower
    assert now <= sooner
