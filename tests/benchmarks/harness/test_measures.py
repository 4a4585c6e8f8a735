"""Tests statistics of samples against values worked out by hand."""

import random

from benchmarks.harness.measures import interval, median_interval


def test_the_interval_of_a_median_gets_narrow_with_many_samples() -> None:
    rng = random.Random(2)
    few, many = ([rng.gauss(1.02, 0.05) for _ in range(count)] for count in (5, 200))
    assert median_interval([1.5] * 4, 100) == (1.5, 1.5)
    low, high = median_interval(many, 500)
    assert low < 1.02 < high
    lower, higher = median_interval(few, 500)
    assert 0 < 3 * (high - low) < higher - lower


def test_an_interval_leaves_out_a_fortieth_at_either_end() -> None:
    ranks = iter(random.Random(0).sample(range(1, 1001), 1000))
    assert interval(lambda rng: next(ranks), 1000) == (25, 975)
