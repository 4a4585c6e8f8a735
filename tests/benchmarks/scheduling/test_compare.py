"""Tests what the scheduler benchmarks conclude from their measurements."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.scheduling import file as schedulers_file
from benchmarks.scheduling import legs as schedulers_legs
from benchmarks.scheduling import report, tenants
from benchmarks.scheduling.legs import Leg, Sample, Shape
from benchmarks.speed import itl, planning_cost
from reprise.loadgen.measure.sender import TurnResult
from reprise.model.directories import BUNDLED


def sample(**changes) -> Sample:
    fields = {
        "policy": "car-hidden", "share": 0.5, "round_": 0, "ttft_s": 1.0, "gaps_s": (0.01, 0.01), "queue_s": 0.1,
        "tier_class": 1, "loaded": False, "error": None, "tokens": {}, "missed": {}, "session": "c", "due_s": 0.0,
        "load_wait_s": 0.0, "prefill_s": 0.1,
    }  # fmt: skip
    return Sample(**{**fields, **changes})


def leg(policy: str, share: float, ttft_s: list[float | None], round_: int = 0, **loads: int) -> Leg:
    counts = Counter({f"loads {name}": count for name, count in loads.items()})
    samples = [
        sample(policy=policy, share=share, round_=round_, ttft_s=s, error=None if s is not None else "503")
        for s in ttft_s
    ]
    return Leg(policy, share, round_, 1.0, 1.0, 10.0, counts, 0.0, 0.0, samples)


@pytest.mark.parametrize(
    ("car", "hidden", "failed", "held"),
    [
        ((1.05, 0.80), 95, False, [True, True, True, True]),
        ((1.06, 0.80), 95, False, [True, True, False, True]),
        ((1.05, 0.81), 95, False, [True, True, True, False]),
        ((1.05, 0.80), 94, False, [False, True, True, True]),
        ((1.05, 0.80), 95, True, [True, False, True, True]),
    ],
)
def test_car_is_held_against_fcfs_by_rate(car, hidden, failed, held):
    legs = [leg("fcfs", share, [1.0]) for share in (0.5, 0.95)]
    legs += [leg("car-hidden", share, [ttft_s], finished=hidden - 10, hidden=10, exposed=100 - hidden)
             for share, ttft_s in zip((0.5, 0.95), car, strict=True)]  # fmt: skip
    legs += [leg("priority", 0.5, [None])] if failed else []
    verdicts = report.verdicts(report.summarize(legs))
    assert list(verdicts.values()) == held


def test_the_median_of_the_rounds_is_judged():
    legs = [leg("fcfs", 0.9, [ttft_s], round_) for round_, ttft_s in enumerate((1.0, 2.0, 1.0))]
    legs += [leg("car-hidden", 0.9, [ttft_s], round_, finished=1) for round_, ttft_s in enumerate((0.8, 1.0, 9.0))]
    legs.append(leg("car-hidden", 0.9, [0.1], 3, finished=1))  # fcfs has not been there yet
    found = report.summarize(legs)["ratios"]["0.9"]["car-hidden/fcfs"]
    assert (found["p95_by_round"], found["p95_median"]) == ([0.8, 0.5, 9.0], 0.8)


def test_the_control_shows_what_two_servers_of_one_policy_differ_by():
    legs = [leg("fcfs", 0.9, [1.0]), leg("fcfs-again", 0.9, [1.3]), leg("car-hidden", 0.9, [0.8], finished=1)]
    summary = report.summarize(legs)
    assert summary["ratios"]["0.9"]["fcfs-again/fcfs"]["p95_median"] == 1.3
    assert all(report.verdicts(summary).values()), "and is not judged"
    shape = Shape(24, 1000, 150, 32, 2)
    fcfs, again = (
        schedulers_legs.settings_of(p, str(BUNDLED), shape, 3, 2, 0, 1.0, Path("d")) for p in ("fcfs", "fcfs-again")
    )
    assert fcfs == again


def test_what_was_measured_is_found_again_and_gone_on_from(tmp_path):
    file, workload = tmp_path / "legs.json", {"conversations": 3}
    calibration = schedulers_file.Calibration(0.05, 0.3, 0.05, 8.0, 6.0, 5)
    assert schedulers_file.load(file, workload) is None
    legs = [leg(policy, 0.5, [1.0, None], round_, hidden=2) for round_ in (0, 1) for policy in ("car-hidden", "fcfs")]
    assert [schedulers_file.next_round(legs[:count], 2) for count in range(5)] == [0, 0, 1, 1, 2]
    schedulers_file.save(file, workload, calibration, legs)
    assert schedulers_file.load(file, workload) == (calibration, legs)
    with pytest.raises(ValueError, match="another workload"):
        schedulers_file.load(file, {"conversations": 4})


def test_no_loads_show_nothing():
    verdicts = report.verdicts(report.summarize([leg("car-hidden", 0.5, [1.0])]))
    assert list(verdicts.values()) == [False, True]


def test_a_load_that_nobody_counted_is_not_in_time():
    one = leg("car-hidden", 0.5, [1.0], finished=2)
    one.samples += [sample(tier_class=3, loaded=True)] * 4
    found = report.describe([one])
    assert found["loads"] == {"finished": 2, "hidden": 0, "exposed": 0, "uncounted": 2}
    assert found["loads_hidden"] == 0.5


def test_goodput_counts_turns_in_time():
    turns = [(1.0, (0.05, 0.15)), (1.0, (0.1,)), (1.1, (0.1,)), (0.5, (0.1, 0.2)), (None, ())]
    samples = [sample(ttft_s=ttft_s, gaps_s=gaps_s) for ttft_s, gaps_s in turns]
    found = report.describe([Leg("car-hidden", 0.5, 0, 1.0, 1.0, 10.0, Counter(), 0.0, 0.0, samples)])
    assert (found["goodput"], found["strict_goodput"], found["throughput"]) == (0.2, 0.1, 0.4)
    assert (found["turns"], found["failed"]) == (5, 1)


def test_the_longest_wait_by_class():
    samples = [sample(queue_s=wait_s, tier_class=c) for wait_s, c in ((1.0, 1), (2.0, 3), (0.5, 3))]
    found = report.describe([Leg("car-hidden", 0.5, 0, 1.0, 1.0, 10.0, Counter(), 0.0, 0.0, samples)])
    assert found["max_wait_ms_by_class"] == {"1": 1000.0, "2": 0.0, "3": 2000.0}


def test_the_class_of_a_turn_is_where_most_of_its_history_was():
    def answered(**tokens: int) -> Sample:
        extra = {"x_cache": tokens, "timings": {"queue_ms": 250.0}}
        result = TurnResult("c", 0, 1.0, sent_s=1.5, token_s=[2.0], extra=extra)
        return schedulers_legs.sample_of(result, "car-hidden", 0.5, 0)

    assert (answered().queue_s, answered().ttft_s) == (0.75, 1.0)  # it was sent half a second late
    assert (answered(computed_tokens=3).tier_class, answered(computed_tokens=3).loaded) == (2, False)
    assert (answered(hbm_tokens=9).tier_class, answered(hbm_tokens=9).loaded) == (1, False)
    assert (answered(hbm_tokens=9, disk_tokens=1).tier_class, answered(hbm_tokens=9, disk_tokens=1).loaded) == (1, True)
    assert answered(hbm_tokens=3, disk_tokens=2, dram_tokens=2).tier_class == 3


def test_arrivals_are_the_same_for_all_and_their_conversations_chosen_at_random():
    shape = Shape(24, 1000, 150, 32, 2)
    first, second = (schedulers_legs.arrivals(shape, 4.0, "7", "c") for _ in range(2))
    assert first == second
    counts = Counter(len(c.turns) for c in first)
    assert sum(turns * count for turns, count in counts.items()) == 48
    assert len(counts) > 2
    assert max(counts) <= 4
    dues = sorted(turn.due_s for c in first for turn in c.turns)
    assert 48 / dues[-1] == pytest.approx(4.0, rel=0.5)
    assert all(list(c.turns) == sorted(c.turns, key=lambda turn: turn.due_s) for c in first)


def test_gaps_count_as_busy_while_a_newcomer_waits():
    stamps = [[0.0, 1.0, 2.0, 3.0, 4.0], [0.5, 2.5, 4.5]]
    busy, calm = itl.split_gaps(stamps, [(1.2, 2.2)], last_s=4.0)
    assert busy == [1.0, 1.0, 2.0]
    assert calm == [1.0, 1.0]  # the last gap of the second stream began when another had ended already


@pytest.mark.parametrize(("p99_ms", "held"), [(120.0, True), (121.0, False)])
def test_streams_are_held_to_the_target(p99_ms, held):
    gaps_s = [0.02] * 90 + [p99_ms / 1e3] * 10
    rounds = [itl.Round("target", gaps_s, [0.02], [2.0], [1.0], [4000], 100, 100)]
    rounds.append(itl.Round("whole", [2.0], [0.02], [1.0], [1.0], [4000], 100, 100))
    summary = itl.summarize(rounds, 100.0)
    assert list(summary["held"].values()) == [held]
    assert summary["newcomer_ttft_ratios"] == {"target/whole": 2.0}
    assert summary["arms"]["target"]["newcomer_ttft_to_alone"] == 2.0


@pytest.mark.parametrize(("beside_s", "errors", "held"), [(0.4, 0, [True, True]), (0.41, 1, [False, False])])
def test_the_quiet_tenant_may_lose_three_steps(beside_s, errors, held):
    counts = Counter({"preemptions": 3, "fair_preemptions": 2})
    failed = Counter({"503": errors}) if errors else Counter()
    summary = tenants.summarize(
        [tenants.Round("car-hidden", [0.1] * 3, [beside_s] * 20, [1.0], [0.1] * 5, 10.0, failed, counts)]
    )
    assert list(summary["held"].values()) == held


def test_planning_is_held_to_its_mean_over_enough_steps():
    def arm(mean_ms: float, all_ms: float, steps: int) -> dict:
        means = {"ms_per_step": {"mean": mean_ms}, "ms_per_step_with_the_rest": {"mean": all_ms}}
        return {"policy": "car", "steps": steps, **means}

    cases = (
        (2.0, 2.0, 10, 10.0, [True, True, True]),
        (1.0, 2.1, 10, 10.1, [True, False, False]),
        (1.0, 1.0, 9, 1.0, [False, False, True]),
    )
    for mean_ms, all_ms, steps, worst_ms, held in cases:
        due = {"ms_per_step": {"max": worst_ms}}
        assert list(planning_cost.verdicts([arm(mean_ms, all_ms, steps)], due, 10).values()) == held


def test_the_median_run_of_planning_counts():
    def run(mean_ms: float) -> dict:
        return {"ms_per_step": {"mean": mean_ms}, "ms_per_step_with_the_rest": {"mean": mean_ms + 1}}

    median = planning_cost.median_run([run(3.0), run(1.0), run(2.0)])
    assert (median["ms_per_step"]["mean"], median["ms_per_step_by_run"]) == (2.0, [3.0, 1.0, 2.0])
    assert median["ms_per_step_with_the_rest_by_run"] == [4.0, 2.0, 3.0]
    assert planning_cost.median_run([run(1.0), run(2.0)])["ms_per_step"]["mean"] == 2.0


def test_planning_is_measured_with_as_many_as_asked_for():
    arm = planning_cost.play("car", sessions=60, history=40, places=4, waiting=20, steps=5, profiled=5)
    assert (arm["steps"], arm["profiled_steps"]) == (5, 5)
    assert arm["sessions"] == 60
    assert arm["ms_per_step"]["mean"] == pytest.approx(sum(v["mean"] for v in arm["of_it_ms"].values()), abs=0.01)
    assert any("schedule" in row["function"] for row in arm["profile"])
