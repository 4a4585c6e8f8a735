"""Tests what is concluded of the time that planning and decode steps take."""

import pytest

from benchmarks.speed import cpu_speed, planning_cost


def test_planning_is_measured_with_as_many_as_asked_for():
    found = planning_cost.play(sessions=60, history=40, places=4, waiting=20, steps=5)
    assert (found["steps"], found["sessions"]) == (5, 60)
    assert found["ms_per_step"]["mean"] == pytest.approx(sum(v["mean"] for v in found["of_it_ms"].values()), abs=0.01)


@pytest.mark.parametrize(("q8", "share", "held"), [(0.6, 0.7, [True] * 3), (0.61, 0.69, [False] * 3)])
def test_packed_weights_are_held_against_bf16_and_memory(q8, share, held):
    arms = {arm: {"tpot_ms": {"median": ms}, "share_of_memory_speed": share} for arm, ms in (("bf16", 1.0), ("q8", q8))}
    assert list(cpu_speed.verdicts([{"streams": 1, "context": 16, "arms": arms}]).values()) == held
