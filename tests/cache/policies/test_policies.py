import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.policies import POLICIES
from reprise.cache.returns.return_times import ReturnTimes

KEYS = st.integers(0, 9).map(lambda number: b"%d" % number)
SESSIONS = st.sampled_from("ABC")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), KEYS),
        st.tuples(st.just("remove"), KEYS),  # if it is there
        st.tuples(st.just("own"), KEYS, SESSIONS, st.integers(0, 5)),
        st.tuples(st.just("forget"), SESSIONS),
        st.tuples(st.just("used"), SESSIONS, st.integers(0, 50)),
        st.tuples(st.just("look_ahead"), st.lists(SESSIONS, unique=True)),
    )
)


def replay(name, steps):
    returns, resident = ReturnTimes(), set()
    policy = POLICIES[name](returns)
    for event, *arguments in steps:
        if event == "remove" and arguments[0] not in resident:
            continue
        getattr(returns if event == "used" else policy, event)(*arguments)
        if event == "touch":
            resident.add(arguments[0])
        elif event == "remove":
            resident.remove(arguments[0])
    return policy, resident


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS, pinned=st.sets(KEYS))
def test_victims_are_exactly_the_resident_unpinned_blocks(name, steps, pinned):
    policy, resident = replay(name, steps)
    assert sorted(policy.victims(10, pinned)) == sorted(resident - pinned)


@pytest.mark.parametrize("name", POLICIES)
@given(
    steps=STEPS,
    pinned=st.sets(KEYS),
    count=st.integers(0, 10),
    newcomer=st.none() | st.sampled_from("ABCD"),
    spare=st.booleans(),
)
def test_asking_changes_nothing_and_fewer_are_the_best_of_more(name, steps, pinned, count, newcomer, spare):
    policy, resident = replay(name, steps)
    ranked = policy.victims(10, pinned)
    assert policy.victims(count, pinned) == ranked[:count]
    terms = {"newcomer": newcomer, "spare_queued": spare}
    allowed = policy.victims(10, pinned, **terms)
    assert len(set(allowed)) == len(allowed)
    assert set(allowed) <= resident - pinned
    assert policy.victims(count, pinned, **terms) == allowed[:count]
    assert policy.victims(10, pinned) == ranked


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS)
def test_what_nobody_owns_leaves_for_any_newcomer(name, steps):
    policy, resident = replay(name, [step for step in steps if step[0] != "own"])
    assert sorted(policy.victims(10, (), newcomer="A", spare_queued=True)) == sorted(resident)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_not_there_cannot_leave(name):
    with pytest.raises(KeyError):
        POLICIES[name](ReturnTimes()).remove(b"1")


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [b"c", b"a", b"b"]),  # a and b were used again after c came
        ("fifo", [b"a", b"c", b"b"]),  # b left and came back after c, a's second use does not count
        ("lookahead", [b"c", b"a", b"b"]),  # no owners: as lru
    ],
)
def test_order_of_leaving(name, order):
    steps = [("touch", b"a"), ("touch", b"b"), ("touch", b"c"), ("remove", b"b"), ("touch", b"a"), ("touch", b"b")]
    policy, _ = replay(name, steps)
    assert policy.victims(3, ()) == order
    assert policy.victims(1, {order[0]}) == [order[1]]


@pytest.mark.parametrize("name", ["lru", "fifo"])
@given(steps=STEPS)
def test_some_judge_by_the_past_alone(name, steps):
    told, _ = replay(name, steps)
    untold, _ = replay(name, [step for step in steps if step[0] in ("touch", "remove")])
    assert told.victims(10, ()) == untold.victims(10, ())
    assert told.victims(10, (), newcomer="A", spare_queued=True) == told.victims(10, ())  # a newcomer is always let in
