import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.returns.return_times import ReturnTimes, shared_rank

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("used"), st.sampled_from("ABCD"), st.floats(0, 500), st.none() | st.integers(1, 10_000)),
        st.tuples(st.just("answered"), st.sampled_from("ABCD"), st.floats(0, 60), st.integers(1, 10_000)),
        st.tuples(st.just("forget"), st.sampled_from("ABCD")),
        st.tuples(st.just("advance"), st.floats(0, 100_000)),
    ),
    max_size=40,
)


@given(events=EVENTS)
def test_every_change_of_a_rank_is_told_and_ranks_are_distinct(events):
    """An index of sessions in order relies on it."""
    returns, told, now = ReturnTimes(), {}, 0.0
    returns.listen(lambda changed: told.update((session.name, session.rank) for session in changed))
    for event, *arguments in events:
        if event == "forget":
            returns.forget(arguments[0])
            told.pop(arguments[0], None)
            continue
        if event == "advance":
            now += arguments[0]
            returns.advance(now)
        else:
            name, wait, tokens = arguments
            now += wait
            told.setdefault(name, returns.of(name).rank)
            getattr(returns, event)(name, now, tokens)
        assert told == {name: returns.rank(name) for name in told}
        assert len(returns) == len(told) == len(set(told.values()))
        assert returns.rank("never heard of") == returns.newcomer_rank()
        assert returns.newcomer_rank() not in told.values()


def test_of_an_answer_to_nobody_nothing_is_kept():
    returns = ReturnTimes()
    returns.answered("A", 1.0, 10)
    returns.forget("A")
    assert not len(returns)


def play(returns, uses):
    for now, name, *tokens in sorted(uses):
        returns.used(name, now, *tokens)


def worst_first(returns, names):
    return sorted(names, key=returns.rank)


def test_the_oldest_use_is_worth_least_before_anything_is_known():
    returns = ReturnTimes()
    play(returns, [(0.3, "A"), (0.1, "B"), (0.2, "C")])
    returns.of("never used")
    assert worst_first(returns, ["A", "B", "C", "never used"]) == ["never used", "B", "C", "A"]


def test_of_those_that_are_punctual_the_last_to_come_is_worth_least():
    returns = ReturnTimes()
    play(returns, [(10.0 * turn + place, name) for turn in range(8) for place, name in enumerate("ABCD")])
    assert worst_first(returns, "ABCD") == ["D", "C", "B", "A"]  # at 73: D comes at 83, A at 80
    returns.advance(79.0)
    assert worst_first(returns, "ABCD") == ["D", "C", "B", "A"]
    near = {name: returns.of(name).value for name in "ABCD"}
    returns.advance(150.0)  # nobody came
    assert all(returns.of(name).value < near[name] / 2 for name in "ABCD")


def test_who_takes_turns_is_not_late_when_all_are():
    returns = ReturnTimes()
    play(returns, [(10.0 * turn + 2.5 * place, name) for turn in range(8) for place, name in enumerate("ABCD")])
    play(returns, [(85.0, "A"), (92.5, "B")])  # three times as slow, all at once
    assert worst_first(returns, "ABCD")[0] == "B"
    for now in (92.5, 95.0, 99.9):
        returns.advance(now)
        assert worst_first(returns, "ABCD")[-1] == "C"


def test_a_gap_that_is_like_the_one_before_by_chance_is_no_rhythm():
    """Nobody's gap has to do with the one before: whose last two were alike is no nearer for it."""
    returns, rng, uses = ReturnTimes(), random.Random(0), []
    for number in range(400):
        at_s = 5.0 * number
        uses.append((at_s, f"{number}"))
        while rng.random() < 0.4:
            at_s += 20.0 * 20.0 ** rng.random()
            uses.append((at_s, f"{number}"))
    play(returns, uses)
    now = max(at_s for at_s, _ in uses) + 2000.0
    play(returns, [(now - turn * gap_s, name) for name, gap_s in (("near", 200.0), ("far", 20.0)) for turn in range(3)])
    for _ in range(400):  # sessions are reconsidered a little at a time
        returns.advance(now + 160.0)
    assert returns.of("near").value < 1.5 * returns.of("far").value


def test_who_comes_once_is_told_by_the_size_of_the_prompt():
    """Sessions that open with 100 tokens never come back; those that open with 5,000 do, after a minute."""
    returns = ReturnTimes()
    uses = [(float(number), f"once {number}", 100) for number in range(400)]
    uses += [(number + 60.0 * turn, f"more {number}", 5000 + turn) for number in range(400) for turn in range(2)]
    play(returns, uses)
    returns.used("long", 500.0, 5000)
    returns.used("short", 501.0, 100)
    assert worst_first(returns, ["long", "short"]) == ["short", "long"]


def test_a_prompt_has_grown_by_what_it_has_more_than_the_turn_before():
    returns = ReturnTimes()
    play(returns, [(0.0, "s", 1000), (60.0, "s", 1010)])
    assert returns.of("s").grown == 10
    play(returns, [(120.0, "s", 900)])
    assert returns.of("s").grown == -110


def test_the_newest_gap_tells_what_the_mean_of_all_does_not():
    """Everybody comes back after 20 s and after 400 s in turn."""
    returns, uses = ReturnTimes(), []
    for number in range(300):
        gaps = [(20.0, 400.0)[(number + turn) % 2] for turn in range(6)]
        uses += [(7.0 * number + sum(gaps[:turn]), f"{number}") for turn in range(7)]
    play(returns, uses)
    now, last = max(at_s for at_s, _ in uses) + 2000.0, []
    for name, gaps in (("slowly", (20.0, 400.0) * 3), ("fast", (400.0, 20.0) * 3)):
        last += [(now - sum(gaps[turn:]), name) for turn in range(7)]
    play(returns, last)
    assert returns.of("slowly").value > 2 * returns.of("fast").value  # came back slowly, and so is next


def test_what_the_answer_tells_counts_once_it_is_known():
    """Sessions whose answer was short never come back."""
    returns, told = ReturnTimes(), []
    for number in range(400):
        returns.used(number, float(number), 1000)
        returns.answered(number, number + 0.5, 1010 if number % 2 else 1500)
        if number >= 60 and number % 2 == 0:
            returns.used(number - 60, float(number), 2000)
    returns.used("a", 400.0, 1000)
    returns.used("b", 400.0, 1000)
    a, b = returns.of("a"), returns.of("b")
    before = a.value
    assert a.value == pytest.approx(b.value, rel=1e-3)  # what others have not done is learned meanwhile
    returns.listen(told.extend)
    returns.answered("a", 401.0, 1500)
    assert a in told
    returns.answered("b", 401.0, 1010)
    assert a.value > b.value
    assert b.value < before


def test_when_all_are_due_together_an_event_reconsiders_a_few_of_them():
    returns, told = ReturnTimes(), []
    for number in range(2000):
        returns.used(number, 0.0)
    returns.listen(told.append)
    returns.advance(1000.0)
    assert len(told[0]) < 100
    for rounds in range(2000):
        if len(told) == rounds:
            break
        returns.advance(1000.0)
    else:
        raise AssertionError("it never ends")
    assert all(due[0] > 1000.0 for due in returns._due)
    assert len(list(returns._due)) == 2000


def test_memory_ends_with_the_sessions():
    returns = ReturnTimes()
    for number in range(100):
        for turn in range(3):
            returns.used(number, number + 50.0 * turn, 100)
        returns.forget(number)
    assert not returns._due
    assert not len(returns)


STEPS = st.just(-inf) | st.integers(-80, 30).map(float)


@given(steps=st.lists(STEPS, min_size=1, max_size=8))
def test_what_several_may_come_for_ranks_with_none_of_them_above_it(steps):
    ranks = sorted((value, -100.0 * place, place) for place, value in enumerate(steps))
    together = shared_rank(ranks)
    assert together >= ranks[-1]
    assert together >= shared_rank(ranks[-1:])
    assert together[0] <= ranks[-1][0] + 4 * 3  # eight times the best: three doublings


def test_values_add_up_by_hand():
    """Four steps are a doubling: two of the same value are worth four steps more."""
    assert shared_rank([(-20.0, -5.0, 1), (-20.0, -4.0, 2)]) == (-16.0, -4.0, 2)
    assert shared_rank([(-inf, -inf, 1), (-20.0, -4.0, 2)]) == (-20.0, -4.0, 2)
