import math

from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.policies.belady import BeladyPolicy

KEYS = st.integers(0, 6).map(lambda number: b"%d" % number)


class Told:
    """A future that is a dictionary."""

    def __init__(self, **uses):
        self.uses = uses

    def next_use(self, key):
        return self.uses.get(key.decode(), math.inf)


def test_the_farthest_use_leaves_first_then_the_newest_touch():
    policy = BeladyPolicy(Told(a=5, b=9, c=5))
    for key in (b"a", b"b", b"c", b"never"):
        policy.touch(key)
    assert policy.victims(9, ()) == [b"never", b"b", b"c", b"a"]
    assert policy.victims(2, {b"never"}) == [b"b", b"c"]
    policy._future.uses["b"] = 1
    policy.touch(b"b")
    policy.remove(b"never")
    assert policy.victims(9, ()) == [b"c", b"a", b"b"]


@given(steps=st.lists(st.tuples(st.booleans(), KEYS, st.integers(0, 5))), pinned=st.sets(KEYS), count=st.integers(0, 8))
def test_victims_are_the_resident_ones_by_next_use_and_asking_changes_nothing(steps, pinned, count):
    future, resident = Told(), {}
    policy = BeladyPolicy(future)
    for number, (stays, key, use) in enumerate(steps):
        if stays:
            future.uses[key.decode()] = use
            policy.touch(key)
            resident[key] = (-use, -number)
        elif key in resident:
            policy.remove(key)
            del resident[key]
    expected = sorted((key for key in resident if key not in pinned), key=resident.__getitem__)
    assert policy.victims(count, pinned) == expected[:count]
    assert policy.victims(9, pinned) == expected
