"""The fit stays within its bounds and moves nothing else."""

from dataclasses import asdict

import pytest

from benchmarks.fit_paper import BOUNDS, DIFFERENCES, moved
from loadgen.sim.presets import FITTED


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_step_goes_no_farther_than_the_bounds(name):
    least, most = BOUNDS[name]
    assert getattr(moved(FITTED, {name: -1e9}), name) == least
    assert getattr(moved(FITTED, {name: 1e9}), name) == most
    stepped = asdict(moved(FITTED, {name: DIFFERENCES[name]}))
    assert stepped.pop(name) == getattr(FITTED, name) + DIFFERENCES[name]
    assert stepped.items() <= asdict(FITTED).items()
