"""Tests what the benchmark of loading and saving during computation concludes."""

import pytest

from benchmarks.speed import overlap

WAYS = ("asynchronous", "synchronous", "not saved")


def saves(*rounds: tuple[float, float, float]) -> dict:
    return {(1000, 0.1, way): [{"job_ms": ms[i]} for ms in rounds] for i, way in enumerate(WAYS)}


def test_the_gain_of_asynchronous_saving():
    (gain,) = overlap.saving_gains(saves((85.0, 100.0, 80.0), (90.0, 100.0, 80.0), (80.0, 100.0, 80.0)))
    assert gain == {
        "prompt_tokens": 1000,
        "dram_gbps": 0.1,
        "shorter_by": {"median": 0.15, "min": 0.1, "max": 0.2},
        "hidden": 0.75,
    }


@pytest.mark.parametrize("rounds", [[(85.0, 100.0, 101.0), (85.0, 100.0, 80.0)], [(50.0, 100.0, 80.0)]])
def test_no_share_is_said_to_hide_where_saving_costs_less_than_runs_differ_by(rounds):
    assert overlap.saving_gains(saves(*rounds))[0]["hidden"] is None


def test_only_the_stated_arm_is_held_against_the_share_to_hide():
    arms = [
        {"disk_gbps": gbps, "new_tokens": new, "read_buffer_layers": layers, "hidden": {"median": hidden}}
        for gbps, new, layers, hidden in (
            (0.15, 100, 5, 0.1),
            (0.4, 20, 5, 0.2),
            (0.4, 100, 0, 0.3),
            (0.4, 100, 5, 0.9),
        )
    ]
    assert list(overlap.verdicts(arms, []).values()) == [True]
    arms[-1]["hidden"]["median"] = 0.89
    assert list(overlap.verdicts(arms, []).values()) == [False]


def test_a_comparison_in_which_no_thread_saved_is_void():
    saving = [{"way": way, "saving_ms": {"min": ms}} for way, ms in zip(WAYS, (1.0, 2.0, 0.0), strict=True)]
    assert list(overlap.verdicts([], saving).values()) == [True]
    saving[1]["saving_ms"]["min"] = 0.0
    assert list(overlap.verdicts([], saving).values()) == [False]
