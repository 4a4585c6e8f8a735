"""Tests what is concluded of the time that planning and decode steps take."""

import pytest

from benchmarks.speed import cpu_speed, planning_cost


def arm(mean_ms: float, all_ms: float, steps: int) -> dict:
    means = {"ms_per_step": {"mean": mean_ms}, "ms_per_step_with_the_rest": {"mean": all_ms}}
    return {"policy": "car", "steps": steps, **means}


@pytest.mark.parametrize(
    ("mean_ms", "all_ms", "steps", "worst_ms", "held"),
    [
        (2.0, 2.0, 10, 10.0, [True, True, True]),
        (1.0, 2.1, 10, 10.1, [True, False, False]),
        (1.0, 1.0, 9, 1.0, [False, False, True]),
    ],
)
def test_planning_is_held_to_its_mean_over_enough_steps(mean_ms, all_ms, steps, worst_ms, held):
    due = {"ms_per_step": {"max": worst_ms}}
    assert list(planning_cost.verdicts(arm(mean_ms, all_ms, steps), due, 10).values()) == held


def test_the_median_run_of_planning_counts():
    median = planning_cost.median_run([arm(3.0, 4.0, 1), arm(1.0, 2.0, 1), arm(2.0, 3.0, 1)])
    assert (median["ms_per_step"]["mean"], median["ms_per_step_by_run"]) == (2.0, [3.0, 1.0, 2.0])


def test_planning_is_measured_with_as_many_as_asked_for():
    found = planning_cost.play(sessions=60, history=40, places=4, waiting=20, steps=5)
    assert (found["steps"], found["sessions"]) == (5, 60)
    assert found["ms_per_step"]["mean"] == pytest.approx(sum(v["mean"] for v in found["of_it_ms"].values()), abs=0.01)
    assert planning_cost.burst(sessions=20, history=40, waiting=5)["ms_per_step"]["count"] == planning_cost.BURST_STEPS


@pytest.mark.parametrize(("q8", "share", "held"), [(0.6, 0.7, [True] * 3), (0.61, 0.69, [False] * 3)])
def test_packed_weights_are_held_against_bf16_and_memory(q8, share, held):
    arms = {arm: {"tpot_ms": {"median": ms}, "share_of_memory_speed": share} for arm, ms in (("bf16", 1.0), ("q8", q8))}
    assert list(cpu_speed.verdicts([{"streams": 1, "context": 16, "arms": arms}]).values()) == held
