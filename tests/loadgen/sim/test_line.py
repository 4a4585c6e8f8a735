"""What the policies are told of the line is what comparing it would find."""

from hypothesis import given
from hypothesis import strategies as st

from loadgen.sim.line import Line
from loadgen.virtual.greedy import greedy
from scheduler.sequence import Sequence


def waiting(name: str, turn: int) -> Sequence:
    return Sequence(f"{name}/{turn}", "", name, greedy(1), 0.0, [], 0)


# Several may leave or come, or all stand in another order, before anybody asks.
EVENTS = st.lists(st.sampled_from(["leave", "come", "come", "reverse", "follow", "ask", "ask"]), max_size=60)


@given(events=EVENTS, most=st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=8))
def test_news_are_the_difference_to_what_was_told_before(events, most):
    line, queue, told, turns = Line(), [], None, 0
    for place, event in enumerate(events):
        if event == "leave" and queue:
            queue = queue[1:]
        elif event == "come":
            absent = [name for name in "abcdefgh" if name not in {sequence.session_id for sequence in queue}]
            queue = [*queue, waiting(absent[turns % len(absent)], turns)] if absent else queue
            turns += 1
        elif event == "reverse":
            queue = queue[::-1]
        elif event == "follow":
            line.follow(queue)
        elif event == "ask":
            line.follow(queue)
            window = most[place % len(most)]
            names, changed = line.news("tier", window)
            assert names == [sequence.session_id for sequence in queue][:window]
            assert len(line) == len(queue)
            if told is None:
                assert changed is None
            elif changed is not None:
                assert changed == told ^ set(names)
            told = set(names)


def test_who_leaves_at_the_head_and_comes_at_the_tail_is_known_without_comparing():
    a, b, c = waiting("a", 0), waiting("b", 0), waiting("c", 0)
    line = Line()
    assert line.follow([a, b])
    line.news("tier", None)
    assert line.follow([b, c, waiting("a", 1)])
    names, changed = line.news("tier", None)
    assert names == ["b", "c", "a"]
    assert changed == {"c"}
