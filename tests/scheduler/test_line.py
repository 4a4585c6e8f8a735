"""Tests that the changes a line reports equal those found by comparing every member."""

from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.line import Line, common_ends

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


# Several may leave or come, or all stand in another order, before anybody looks.
EVENTS = st.lists(st.sampled_from(["leave", "leave", "come", "come", "jump", "reverse", "look"]), max_size=80)


@given(events=EVENTS)
def test_a_change_is_the_difference_to_the_line_that_was_seen_before(events):
    line, seen, values = Line(), Line(), []
    for number, event in enumerate(events):
        members = line.members
        if event == "leave":
            line = line.followed_by(members[1:])
        elif event == "come":
            line = line.followed_by((*members, number))
        elif event == "jump":
            line = line.followed_by((*members[2:], number, *members[:2]))
        elif event == "reverse":
            line = line.followed_by(members[::-1])
        else:
            change = line.since(seen)
            assert sorted(change.joined) == sorted(set(line.members) - set(seen.members))
            assert sorted(change.left) == sorted(set(seen.members) - set(line.members))
            change.apply(values, str)
            assert values == [str(member) for member in line.members]
            seen = line


def test_every_line_has_a_version_of_its_own():
    first = Line().followed_by("ab")
    second = first.followed_by("ba")
    assert [Line().version, first.version, second.version] == [0, 1, 2]
    assert first.members == ("a", "b"), "a line that somebody keeps does not change"


def test_a_line_knows_who_leaves_at_its_head_and_comes_at_its_tail_without_comparing_the_rest():
    before = Line().followed_by("abcdefgh")
    change = before.followed_by("cdefghij").since(before)
    assert change == (("a", "b"), 6, (), ("i", "j"))
    assert (change.joined, change.left) == (["i", "j"], ["a", "b"])


def test_all_who_wait_are_new_to_whoever_has_seen_no_line():
    change = Line().followed_by("ab").since(None)
    assert (change.joined, change.left) == (["a", "b"], [])
