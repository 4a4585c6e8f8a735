import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.returns.regulars import Regulars

A, B = ("t", "", "a"), ("t", "", "b")


def come(regulars, name, *times):
    for now in times:
        regulars.used(name, now)


def test_two_like_gaps_foretell_a_third_once():
    regulars = Regulars()
    come(regulars, A, 0.0, 10.0)
    assert regulars.due(19.0) is None  # one gap may be anything
    come(regulars, A, 21.0)
    assert regulars.due(29.0) is None
    assert regulars.due(29.5) == A  # three quarters of 11 seconds later
    assert regulars.due(29.6) == A
    regulars.served()
    assert regulars.due(29.7) is None


@pytest.mark.parametrize("third", [14.0, 31.0])
def test_gaps_that_differ_foretell_nothing(third):
    regulars = Regulars()
    come(regulars, A, 0.0, 10.0, third)
    assert regulars.due(third + 9.0) is None


def test_who_has_come_is_gone_or_is_overdue_is_not_due():
    regulars = Regulars()
    come(regulars, A, 0.0, 10.0, 20.0, 26.0)  # sooner than it used to
    come(regulars, B, 0.0, 10.0, 20.0)
    regulars.forget(B)
    assert regulars.due(28.0) is None
    late = Regulars()
    come(late, A, 0.0, 10.0, 20.0)
    assert late.due(33.0) is None


def test_branches_of_one_turn_are_no_returns():
    regulars = Regulars()
    come(regulars, A, 0.0, 0.0, 10.0, 10.01, 20.0)
    assert regulars.due(27.6) == A


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=60))
def test_only_whose_two_newest_gaps_are_alike_are_due_each_at_most_once_a_turn(events):
    regulars, now, times, told = Regulars(), 0.0, {}, set()
    for number, passed in events:
        now += passed
        while (name := regulars.due(now)) is not None:
            a, b, c = times[name][-3:]
            assert abs((c - b) - (b - a)) <= 0.25 * (b - a) + 1e-9
            assert (name, c) not in told
            assert c + 0.75 * (c - b) - 1e-9 <= now <= c + 1.25 * (c - b) + 1e-9
            told.add((name, c))
            regulars.served()
        name = ("t", "", str(number))
        regulars.used(name, now)
        if name not in times or now - times[name][-1] >= 0.05:
            times.setdefault(name, []).append(now)
