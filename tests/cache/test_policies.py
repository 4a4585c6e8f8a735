import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policies import POLICIES

KEYS = st.integers(0, 9).map(lambda number: b"%d" % number)
STEPS = st.lists(st.tuples(st.booleans(), KEYS))  # True: touch; False: remove, if it is there


def replay(policy, steps):
    resident = set()
    for touch, key in steps:
        if touch:
            policy.touch(key)
            resident.add(key)
        elif key in resident:
            policy.remove(key)
            resident.remove(key)
    return policy, resident


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS, pinned=st.sets(KEYS))
def test_victims_are_exactly_the_resident_unpinned_blocks(name, steps, pinned):
    policy, resident = replay(POLICIES[name](), steps)
    assert sorted(policy.victims(10, pinned)) == sorted(resident - pinned)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS, pinned=st.sets(KEYS), count=st.integers(0, 10))
def test_asking_changes_nothing_and_fewer_are_the_best_of_more(name, steps, pinned, count):
    policy, _ = replay(POLICIES[name](), steps)
    ranked = policy.victims(10, pinned)
    assert policy.victims(count, pinned) == ranked[:count]
    assert policy.victims(10, pinned) == ranked


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS, upcoming=st.dictionaries(KEYS, st.integers(0, 9)))
def test_looking_ahead_makes_no_block_appear_or_vanish(name, steps, upcoming):
    policy, resident = replay(POLICIES[name](), steps)
    policy.look_ahead(upcoming)
    assert sorted(policy.victims(10, ())) == sorted(resident)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_not_there_cannot_leave(name):
    with pytest.raises(KeyError):
        POLICIES[name]().remove(b"1")


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [b"c", b"a", b"b"]),  # a and b were used again after c came
        ("fifo", [b"a", b"c", b"b"]),  # b left and came back after c, a's second use does not count
    ],
)
def test_order_of_leaving(name, order):
    steps = [(True, b"a"), (True, b"b"), (True, b"c"), (False, b"b"), (True, b"a"), (True, b"b")]
    policy, _ = replay(POLICIES[name](), steps)
    assert policy.victims(3, ()) == order
    assert policy.victims(1, {order[0]}) == [order[1]]
