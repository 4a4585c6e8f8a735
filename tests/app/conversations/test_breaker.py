from hypothesis import given
from hypothesis import strategies as st

from reprise.app.conversations.breaker import Breaker


def test_it_opens_after_failures_in_a_row_and_lets_one_through_after_a_pause():
    breaker = Breaker(failures=3, pause_s=5.0)
    for _ in range(2):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    breaker.succeeded()  # not in a row
    for now in (1.0, 2.0, 3.0):
        assert breaker.allows(now)
        breaker.failed(now)
    assert (breaker.state(7.9), breaker.allows(7.9)) == ("open", False)
    assert breaker.state(8.0) == "half_open"
    assert [breaker.allows(8.0), breaker.allows(8.1)] == [True, False]
    breaker.failed(9.0)
    assert not breaker.allows(13.9)
    assert breaker.allows(14.0)
    breaker.succeeded()
    assert (breaker.state(14.0), breaker.failures) == ("closed", 6)


def test_a_call_whose_end_nobody_heard_is_not_waited_for_for_ever():
    breaker = Breaker(failures=1, pause_s=5.0)
    breaker.failed(0.0)
    assert breaker.allows(5.0)
    assert not breaker.allows(9.9)
    assert breaker.allows(10.0)


@given(steps=st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=60))
def test_who_always_fails_is_asked_at_most_once_a_pause_and_who_works_always(steps):
    now, asked, breaker, row = 0.0, [], Breaker(failures=3, pause_s=5.0), 0
    for after, works in steps:
        now += after
        if not breaker.allows(now):
            assert row >= 3
            continue
        if row >= 3:
            assert now >= asked[-1] + 5.0
        asked.append(now)
        row = 0 if works else row + 1
        breaker.succeeded() if works else breaker.failed(now)
