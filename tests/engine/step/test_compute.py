"""Tests how long a step takes, on two clocks."""

import time

import pytest

from engine.step.compute import StepClock


def test_a_step_goes_on_with_its_callers_clock_and_counts_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: ours)
    ours = 100.0
    clock = StepClock(7.0)
    ours = 100.5  # half a second of scheduling
    clock.begin_computing()
    ours = 102.5
    assert (clock.called, clock.now(), clock.computing_s()) == (7.0, 9.5, 2.0)
