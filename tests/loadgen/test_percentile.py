"""Tests the one definition of a percentile in the repository."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.loadgen.percentile import percentile


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=200), share=st.sampled_from((0.5, 0.9, 0.95, 0.99, 1.0)))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, share):
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


@pytest.mark.parametrize(
    ("share", "rank"), [(0.001, 1), (0.07, 7), (0.5, 50), (0.9, 90), (0.95, 95), (0.99, 99), (1.0, 100)]
)
def test_percentiles_worked_by_hand(share, rank):
    assert percentile([float(n) for n in range(100, 0, -1)], share) == rank


def test_percentiles_of_few():
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.3, 0.5, 0.95)] == [1.0, 2.0, 3.0]
    assert percentile([7.0], 0.01) == 7.0
    assert math.isnan(percentile([], 0.5))
