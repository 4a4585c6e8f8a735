import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.returns import ranking
from reprise.cache.returns.ranking import Ranking


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40))))
def test_it_is_a_sorted_list(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "_BUCKET_ITEMS", 2)  # many buckets out of few items
        ranked, items = Ranking(), []
        for adds, item in steps:
            if adds and item not in items:
                ranked.add(item)
                items.append(item)
            elif not adds and item in items:
                ranked.remove(item)
                items.remove(item)
            elif not adds:
                with pytest.raises(KeyError):
                    ranked.remove(item)
            assert list(ranked) == sorted(items)
            assert bool(ranked) == bool(items)


def test_no_bucket_grows_without_bound():
    ranked = Ranking()
    for item in range(10_000):
        ranked.add(item * 7919 % 10_007)
    assert max(map(len, ranked._buckets)) <= 2 * ranking._BUCKET_ITEMS
