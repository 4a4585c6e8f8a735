from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.returns.succession import Succession


def foretold(*names):
    """Return who is expected after each of these."""
    succession, found = Succession(), []
    for name in names:
        succession.came(name)
        found.append(succession.next())
    return found


def test_who_takes_turns_is_foretold_when_it_was_right_twice():
    assert foretold(*"abcd" * 3) == [None] * 6 + list("dabcda")


def test_a_session_that_goes_on_by_itself_changes_nothing():
    assert foretold(*"abcabcaaabc")[4:] == [None, "a", "b", "b", "b", "c", "a"]


def test_one_that_comes_out_of_turn_is_a_new_beginning():
    assert foretold(*"abcabcxabc") == [None] * 5 + ["a"] + [None] * 3 + ["x"]


def test_a_turn_is_served_once():
    succession = Succession()
    for name in "abcabc":
        succession.came(name)
    assert succession.next() == succession.next() == "a"
    succession.served()
    assert succession.next() is None
    succession.came("a")
    assert succession.next() == "b"


@given(events=st.lists(st.tuples(st.sampled_from(["came", "forget"]), st.sampled_from("abcde")), max_size=60))
def test_nothing_is_kept_of_who_is_forgotten(events):
    succession = Succession()
    for event, name in events:
        getattr(succession, event)(name)
        succession.next()
    for name in "abcde":
        succession.forget(name)
    assert succession.next() is None
    assert not succession._after
