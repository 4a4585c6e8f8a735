from hypothesis import given
from hypothesis import strategies as st

from reprise.loadgen.offload.mini_batches import Load, imbalance, pack

EQUAL = {"make_s": float, "load_s": float}


def test_requests_that_balance_each_other_share_a_mini_batch():
    requests = [Load(10, 0), Load(0, 10), Load(5, 5), Load(10, 0), Load(0, 10)]
    assert pack(requests, most_tokens=20, **EQUAL) == [[0, 1], [2], [3, 4]]
    assert pack([Load(5, 0)] * 3, most_tokens=10, **EQUAL) == [[0, 1], [2]]  # no worse than alone


def test_none_joins_that_leaves_it_less_balanced():
    assert pack([Load(5, 5), Load(5, 0), Load(5, 5)], most_tokens=100, **EQUAL) == [[0, 2], [1]]


def test_imbalance_is_by_how_much_one_side_takes_longer():
    assert imbalance(Load(3, 4), make_s=lambda n: 2.0 * n, load_s=float) == 0.5
    assert imbalance(Load(0, 0), **EQUAL) == 0.0
    assert imbalance(Load(0, 1), **EQUAL) == float("inf")


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20), most_tokens=st.integers(1, 120)
)  # fmt: skip
def test_every_request_is_in_one_mini_batch_that_fits(sizes, most_tokens):
    requests = [Load(*size) for size in sizes]
    batches = pack(requests, most_tokens=most_tokens, **EQUAL)
    assert sorted(place for batch in batches for place in batch) == list(range(len(requests)))
    for batch in batches:
        assert len(batch) == 1 or sum(requests[place].act + requests[place].kv for place in batch) <= most_tokens
