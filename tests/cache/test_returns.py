from math import inf

from hypothesis import given
from hypothesis import strategies as st

from cache.policies.returns import ReturnTimes, shared_rank

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
    """Who keeps sessions in order relies on it."""
    returns, sessions, ranks, now = ReturnTimes(), {}, {}, 0.0
    for event, *arguments in events:
        if event == "forget":
            if (session := sessions.pop(arguments[0], None)) is not None:
                returns.forget(session)
                del ranks[session]
            continue
        if event == "advance":
            now += arguments[0]
            changed = returns.advance(now)
        else:
            name, wait, tokens = arguments
            now += wait
            if name not in sessions:
                sessions[name] = returns.add(name)
                ranks[sessions[name]] = sessions[name].rank
            changed = getattr(returns, event)(sessions[name], now, tokens)
        for session in changed:
            ranks[session] = session.rank
        assert ranks == {session: session.rank for session in sessions.values()}
        assert len(set(ranks.values())) == len(ranks)
        assert returns.newcomer_rank() not in ranks.values()


def play(returns, sessions, uses):
    for now, name, *tokens in sorted(uses):
        returns.used(sessions.setdefault(name, returns.add(name)), now, *tokens)


def worst_first(sessions):
    return sorted(sessions, key=lambda name: sessions[name].rank)


def test_the_oldest_use_is_worth_least_before_anything_is_known():
    returns, sessions = ReturnTimes(), {}
    play(returns, sessions, [(0.3, "A"), (0.1, "B"), (0.2, "C")])
    sessions["never used"] = returns.add("never used")
    assert worst_first(sessions) == ["never used", "B", "C", "A"]


def test_of_those_that_are_punctual_the_last_to_come_is_worth_least():
    returns, sessions = ReturnTimes(), {}
    play(returns, sessions, [(10.0 * turn + place, name) for turn in range(8) for place, name in enumerate("ABCD")])
    assert worst_first(sessions) == ["D", "C", "B", "A"]  # at 73: D comes at 83, A at 80
    returns.advance(79.0)
    assert worst_first(sessions) == ["D", "C", "B", "A"]
    near = {name: session.value for name, session in sessions.items()}
    returns.advance(150.0)  # nobody came
    assert all(session.value < near[name] / 2 for name, session in sessions.items())


def test_who_comes_once_is_told_by_the_size_of_the_prompt():
    """Sessions that open with 100 tokens never come back; those that open with 5,000 do, after a minute."""
    returns, sessions = ReturnTimes(), {}
    uses = [(float(number), f"once {number}", 100) for number in range(400)]
    uses += [(number + 60.0 * turn, f"more {number}", 5000 + turn) for number in range(400) for turn in range(2)]
    play(returns, sessions, uses)
    here = {"long": returns.add("long"), "short": returns.add("short")}
    returns.used(here["long"], 500.0, 5000)
    returns.used(here["short"], 501.0, 100)
    assert worst_first(here) == ["short", "long"]


def test_the_newest_gap_tells_what_the_mean_of_all_does_not():
    """Everybody comes back after 20 s and after 400 s in turn."""
    returns, sessions, uses = ReturnTimes(), {}, []
    for number in range(300):
        gaps = [(20.0, 400.0)[(number + turn) % 2] for turn in range(6)]
        uses += [(7.0 * number + sum(gaps[:turn]), f"{number}") for turn in range(7)]
    play(returns, sessions, uses)
    here, now, last = {}, max(at_s for at_s, _ in uses) + 2000.0, []
    for name, gaps in (("slowly", (20.0, 400.0) * 3), ("fast", (400.0, 20.0) * 3)):
        last += [(now - sum(gaps[turn:]), name) for turn in range(7)]
    play(returns, here, last)
    assert here["slowly"].value > 2 * here["fast"].value  # came back slowly, and so is next


def test_what_the_answer_tells_counts_once_it_is_known():
    """Sessions whose answer was short never come back."""
    returns, sessions = ReturnTimes(), {}
    for number in range(400):
        session = returns.add(number)
        returns.used(session, float(number), 1000)
        returns.answered(session, number + 0.5, 1010 if number % 2 else 1500)
        sessions[number] = session
        if number >= 60 and number % 2 == 0:
            returns.used(sessions[number - 60], float(number), 2000)
    a, b = returns.add("a"), returns.add("b")
    returns.used(a, 400.0, 1000)
    returns.used(b, 400.0, 1000)
    before = a.value
    assert a.value == b.value
    changed = returns.answered(a, 401.0, 1500)
    assert a in changed
    returns.answered(b, 401.0, 1010)
    assert a.value > b.value
    assert b.value < before


def test_when_all_are_due_together_an_event_reconsiders_a_few_of_them():
    returns = ReturnTimes()
    for number in range(2000):
        returns.used(returns.add(number), 0.0)
    assert len(returns.advance(1000.0)) < 100
    rounds = 1
    while returns.advance(1000.0):
        rounds += 1
        assert rounds < 2000
    assert all(due[0] > 1000.0 for due in returns._due)
    assert len(list(returns._due)) == 2000


def test_memory_ends_with_the_sessions():
    returns = ReturnTimes()
    for number in range(100):
        session = returns.add(number)
        for turn in range(3):
            returns.used(session, number + 50.0 * turn, 100)
        returns.forget(session)
    assert not returns._due


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
