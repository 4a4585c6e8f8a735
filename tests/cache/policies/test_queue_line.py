from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.policies.queue_line import QueueLine

ITEMS = st.integers(0, 300)


@given(lines=st.lists(st.lists(ITEMS, unique=True)))
def test_a_line_knows_who_came_and_went(lines):
    line, before = QueueLine(), []
    for sessions in lines:
        assert line.become(sessions) == set(before) ^ set(sessions)
        assert [line[place] for place in range(len(line))] == sessions
        for session in (*before, *sessions):
            assert (session in line) == (session in sessions)
            assert line.place(session) == (sessions.index(session) if session in sessions else None)
        before = sessions
