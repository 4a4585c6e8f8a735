"""Runs the workload of `benchmarks.scheduling.poisson` in the simulator, to test the purpose of the default order."""

import pytest

from benchmarks.scheduling import poisson, poisson_simulated
from benchmarks.scheduling.poisson_simulated import CASES, play

pytestmark = pytest.mark.bench


def played(machine, *arms, seeds=(1, 2, 3)):
    """Arm -> its figures, in ms."""
    return {arm: poisson.describe([play(CASES[machine], arm, seed) for seed in seeds]) for arm in arms}


def test_on_a_slow_machine_first_tokens_come_soon_and_those_of_returning_turns_sooner():
    found = played("slow", "car-hidden-auto", "car-hidden-100", "fcfs-0", seeds=range(1, 9))
    mine, capped, other = (found[arm] for arm in ("car-hidden-auto", "car-hidden-100", "fcfs-0"))
    assert mine["returning"]["p50"] < 0.85 * other["returning"]["p50"]
    assert mine["returning"]["mean"] < 0.9 * other["returning"]["mean"]
    assert mine["first"]["mean"] < 1.2 * other["first"]["mean"]
    assert mine["first"]["mean"] < 0.6 * capped["first"]["mean"], "which a small target holds up"
    assert mine["tokens_per_s"] > 0.98 * other["tokens_per_s"]
    assert capped["itl"]["p99"] < 120, "a number is still kept to"


@pytest.mark.parametrize(("machine", "gap_ms"), [("tiny", 60), ("gpu", 250)])
def test_where_prompts_are_cheap_gaps_stay_short(machine, gap_ms):
    found = played(machine, "car-hidden-auto", "fcfs-0", seeds=[1])
    assert found["car-hidden-auto"]["itl"]["p99"] < gap_ms
    assert found["car-hidden-auto"]["tpot"]["p50"] < 1.1 * found["fcfs-0"]["tpot"]["p50"]


def test_the_table(capsys):
    words = ["--machine", "slow", "--seeds", "1", "--arms", "car-hidden-auto", "fcfs-0"]
    assert poisson_simulated.main(words) == 0
    assert "NOT held at least 4 seeds" in capsys.readouterr().out
