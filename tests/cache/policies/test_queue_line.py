from hypothesis import given
from hypothesis import strategies as st

from cache.policies.queue_line import Line, common_ends

ITEMS = st.integers(0, 300)


@given(
    head=st.lists(ITEMS), left=st.lists(ITEMS), entered=st.lists(ITEMS), tail=st.lists(ITEMS), times=st.integers(1, 40)
)
def test_common_ends_are_as_long_as_they_can_be(head, left, entered, tail, times):
    head, tail = head * times, tail * times
    before, after = head + left + tail, head + entered + tail
    first, last = common_ends(before, after)
    assert first + last <= min(len(before), len(after))
    assert before[:first] == after[:first]
    assert before[len(before) - last :] == after[len(after) - last :]
    if first + last < min(len(before), len(after)):
        assert before[first] != after[first]
        assert before[-1 - last] != after[-1 - last]


@given(lines=st.lists(st.lists(ITEMS, unique=True)))
def test_a_line_knows_who_came_and_went(lines):
    line, before = Line(), []
    for sessions in lines:
        assert line.become(sessions) == set(before) ^ set(sessions)
        assert [line[place] for place in range(len(line))] == sessions
        for session in (*before, *sessions):
            assert (session in line) == (session in sessions)
            assert line.place(session) == (sessions.index(session) if session in sessions else None)
        before = sessions
