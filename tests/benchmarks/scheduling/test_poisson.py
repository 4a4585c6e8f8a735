"""Tests how the benchmark of first tokens under load evaluates answers, and what it concludes."""

import pytest

from benchmarks.scheduling import poisson
from reprise.loadgen.measure.sender import TurnResult


def turn(number, ttft_s, gap_s=0.02, tokens=4):
    stamps = [5.0 + ttft_s + gap_s * n for n in range(tokens)]
    return TurnResult("c", number, 5.0, 5.0, stamps, stamps[-1], completion_tokens=tokens)


def rounds_of(first, returning, gap_s=0.02, seeds=range(4)):
    """Seconds of each server."""
    return [
        poisson.round_of(arm, seed, [turn(0, first[arm]), *(turn(n, returning[arm], gap_s) for n in (1, 2))])
        for arm in first
        for seed in seeds
    ]


def test_every_seed_brings_other_arrivals_and_every_server_the_same():
    workload = poisson.Workload()
    assert workload.arrivals(1) == workload.arrivals(1) != workload.arrivals(2)
    conversations = workload.arrivals(1)
    assert [turn.prompt_tokens for turn in conversations[0].turns] == [1000, 100, 100, 100, 100]
    assert {turn.answer_tokens for c in conversations for turn in c.turns} == {32}
    assert 12 / 0.5 / 3 < conversations[-1].start_s < 3 * 12 / 0.5
    assert {c.session_id for c in conversations}.isdisjoint(c.session_id for c in workload.arrivals(2))


def test_a_server_is_a_policy_and_a_target():
    settings = poisson.settings_of("priority-0", "model", poisson.Workload())
    assert (settings["scheduler.policy"], settings["scheduler.itl_target_ms"]) == ("priority", "0")
    assert poisson.settings_of("car-hidden-auto", "model", poisson.Workload())["scheduler.itl_target_ms"] == "auto"
    assert settings["cache.hbm_tokens"] > 12 * (1000 + 5 * 132)


def test_first_and_returning_turns_are_told_apart():
    found = poisson.describe(
        [poisson.round_of("car-hidden-0", 1, [turn(0, 2.0), turn(1, 0.5, gap_s=0.1), turn(2, 0.7)])]
    )
    assert found["first"] == {"count": 1, "mean": 2000, "p50": 2000, "p95": 2000, "p99": 2000}
    assert (found["returning"]["p50"], found["returning"]["mean"]) == (500, 600)
    assert (found["tpot"]["count"], found["tpot"]["p95"], found["itl"]["count"]) == (3, 100, 9)
    assert found["tokens_per_s"] == pytest.approx(12 / 2.06, abs=0.01)


def test_a_failed_turn_is_no_result():
    with pytest.raises(RuntimeError, match="503"):
        poisson.round_of("car-hidden-0", 1, [turn(0, 1.0), TurnResult("c", 1, 0.0, error="503 overloaded")])


@pytest.mark.parametrize(
    ("mine", "held"),
    [((0.9, 0.9), [True] * 4), ((1.1, 0.9), [True, True, False, True]), ((0.9, 0.97), [True, False, True, True])],
)
def test_what_is_held_and_what_is_lost(mine, held):
    first, returning = ({"car-hidden-auto": ours, "fcfs-0": 1.0} for ours in mine)
    summary = poisson.summarize(rounds_of(first, returning))
    assert list(summary["held"].values()) == held
    assert any("TTFT of first turns, p95: 1.1" in line for line in summary["lost"]) == (mine[0] > 1)
    assert summary["over_fcfs-0"]["car-hidden-auto"]["first"]["p50_by_seed"] == mine[0]
    assert summary["aims"]["TTFT of first turns, p50"] == [mine[0], 0.9]


def test_few_seeds_and_servers_without_the_default_prove_nothing():
    few = poisson.summarize(
        rounds_of({"car-hidden-auto": 0.1, "fcfs-0": 1.0}, {"car-hidden-auto": 0.1, "fcfs-0": 1.0}, seeds=[1])
    )
    assert few["held"]["at least 4 seeds"] is False
    without = poisson.summarize(rounds_of({"car-hidden-0": 0.1, "fcfs-0": 1.0}, {"car-hidden-0": 0.1, "fcfs-0": 1.0}))
    assert without["held"] == {}
    assert poisson.summarize(rounds_of({"car-hidden-auto": 1.0}, {"car-hidden-auto": 1.0}))["held"] == {}
