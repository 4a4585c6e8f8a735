"""Tests what the benchmark of weights in DRAM holds."""

import pytest

from benchmarks.speed.weights import Steps, ratio, verdicts


def test_the_longer_of_both_is_what_a_step_should_take() -> None:
    assert ratio(Steps([110.0, 100.0, 130.0], [60.0, 50.0, 80.0]), 100.0) == pytest.approx(1.1)  # by the link
    assert ratio(Steps([110.0], [10.0]), 20.0) == pytest.approx(1.1)  # by computing
    assert ratio(Steps([100.0], [50.0]), 50.0) == pytest.approx(2.0)  # nothing hidden


@pytest.mark.parametrize(("prefill", "decode", "held"), [(1.1, 1.0, [True, True]), (1.0, 1.2, [True, False])])
def test_each_kind_of_step_is_judged(prefill: float, decode: float, held: list[bool]) -> None:
    arms = {
        "hbm": {"bytes": 0, "prefill": {"ratio": 9.0}, "decode": {"ratio": 9.0}},
        "2 GB/s": {"bytes": 9, "prefill": {"ratio": prefill}, "decode": {"ratio": decode}},
    }
    assert list(verdicts(arms).values()) == held
