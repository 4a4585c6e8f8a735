"""Tests whether a load that was started early counts as in time for its turn."""

from types import SimpleNamespace

import pytest

from reprise.scheduler.early_loads import EarlyLoads
from tests.conftest import make_sequence


class Clock:
    """A load that was started ahead, and when it ends."""

    def __init__(self, *, load_s, had_time=True):
        self.cache = SimpleNamespace(stall_s=self.stall_s)
        self.wrong = []
        forecast = SimpleNamespace(was_wrong=lambda early: self.wrong.append("early" if early else "late"))
        self.loads = EarlyLoads(cache=self.cache, forecast=forecast)
        self.sequence = make_sequence("r", 4)
        self.now, self.ends_s = 0.0, load_s
        self.loads.begin(self.sequence, 0.0, had_time)

    def stall_s(self, request_id):
        return max(0.0, self.ends_s - self.now)

    def outcome(self, *, turn_s, step_s=0.01):
        """Its turn comes after so many seconds, in steps of so many."""
        started = False
        while not self.loads.outcomes:
            self.now += step_s
            self.loads.look(self.now)
            if not started and self.now >= turn_s - 1e-9:
                self.loads.start(self.sequence, self.now)
                started = True
        (outcome,) = self.loads.outcomes
        return outcome


@pytest.mark.parametrize(
    ("load_s", "turn_s", "outcome"),
    [
        (0.01, 0.06, "on_time"),  # idle for 50 ms
        (0.01, 0.08, "early"),
        (0.4, 0.49, "on_time"),  # a quarter of 400 ms is 100
        (0.4, 0.52, "early"),
        (0.4, 0.31, "on_time"),
        (0.4, 0.28, "late"),
        (0.1, 0.06, "on_time"),
        (0.1, 0.04, "late"),
    ],
)
def test_a_load_is_on_time_within_50_ms_or_a_quarter_of_itself(load_s, turn_s, outcome):
    clock = Clock(load_s=load_s)
    assert clock.outcome(turn_s=turn_s) == outcome
    assert clock.wrong == [outcome] * (outcome != "on_time")


def test_steps_are_longer_than_a_load_takes_and_do_not_make_it_look_late_or_early():
    # It ended 10 ms into a step of 200 ms: the turn came 190 ms after it, and 190 ms ahead of one that has just begun.
    assert Clock(load_s=0.01).outcome(turn_s=0.2, step_s=0.2) == "early"
    assert Clock(load_s=0.19).outcome(turn_s=0.2, step_s=0.2) == "on_time"


def test_a_load_for_which_there_was_no_time_is_not_the_timers_fault():
    clock = Clock(load_s=0.4, had_time=False)
    assert clock.outcome(turn_s=0.1) == "at_once"
    assert not clock.wrong
    assert Clock(load_s=0.1, had_time=False).outcome(turn_s=0.4) == "early", "it could have waited"


def test_a_late_load_of_one_who_goes_away_does_not_count():
    clock = Clock(load_s=10.0)
    clock.now = 0.1
    clock.loads.start(clock.sequence, clock.now)
    clock.loads.stopped(clock.sequence)
    clock.now = 20.0
    clock.loads.look(clock.now)
    assert not clock.loads.outcomes
