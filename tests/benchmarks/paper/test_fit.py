"""Tests that the fit stays within its bounds, changes one unknown at a time, and counts its misses."""

from dataclasses import asdict, replace

import pytest

from benchmarks.paper.fit import BOUNDS, POINTS, STEPS, beside, squares
from reprise.loadgen.sim.presets import FITTED


@pytest.mark.parametrize("name", STEPS)
def test_a_step_changes_one_unknown_and_stays_within_its_bounds(name):
    least, most = BOUNDS[name]
    for value in (least, (least + most) / 2, most):
        start = replace(FITTED, **{name: value})
        steps = beside(start, [name], 1.0)
        assert len(steps) == (2 if least < value < most else 1)
        for step in steps:
            assert least <= getattr(step, name) <= most
            assert {other for other in STEPS if asdict(step)[other] != asdict(start)[other]} == {name}


def test_squares_are_of_points_missed_by_the_mean():
    assert squares({point: [rate, rate] for point, rate in POINTS.items()}) == 0
    assert squares({point: [rate - 0.01, rate + 0.03] for point, rate in POINTS.items()}) == pytest.approx(4)
