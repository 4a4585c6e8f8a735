"""Tests how costs and shares are summed up, by hand-worked cases."""

import random
import time

import psutil

from benchmarks.speed.zero_reuse import ARMS, Cost, arms_of, cpu_seconds, request_of, summarize, verdicts


def cost(arm: str, round_: int, cpu_s: float, cached: int = 0) -> Cost:
    return Cost("m", arm, 0, round_, cpu_s, tokens=1000, cached_tokens=cached)


def test_ratios_are_of_the_same_round_and_the_first_round_warms_up() -> None:
    costs = [cost("attentionstore", 0, 9.0), cost("recompute", 0, 1.0)]
    # A slow minute hits both servers of its round: 1.02, 1.0, 1.01.
    for round_, (ours, theirs) in enumerate([(1.02, 1.0), (2.0, 2.0), (5.05, 5.0)], start=1):
        costs += [cost("recompute", round_, theirs), cost("attentionstore", round_, ours)]
        if round_ != 2:  # it takes part now and then
            costs += [cost("no-disk", round_, 1.005 * theirs)]
    (row,) = summarize(costs)
    assert (row["rounds"], row["ratio_p50"], row["no-disk_ratio_p50"]) == (3, 1.01, 1.005)
    assert (row["attentionstore_cpu_ms_per_token_p50"], row["recompute_cpu_ms_per_token_p50"]) == (2.0, 2.0)
    assert all(verdicts([row]).values())


def test_starts_are_told_apart_and_each_warms_up() -> None:
    costs = []
    for start, ours in enumerate([1.0, 1.04, 1.02]):
        for round_ in range(3):
            dear = 9.0 if round_ == 0 else ours
            costs += [Cost("m", "attentionstore", start, round_, dear, 1000, 0)]
            costs += [Cost("m", "recompute", start, round_, 1.0, 1000, 0)]
    (row,) = summarize(costs)
    assert (row["rounds"], row["ratio_p50"], row["ratio_p50_by_start"]) == (6, 1.02, [1.0, 1.04, 1.02])


def test_cpu_time_is_counted_finely() -> None:
    process = psutil.Process()
    before = cpu_seconds(process)
    until = time.process_time() + 0.003
    while time.process_time() < until:
        pass
    assert 0.003 <= cpu_seconds(process) - before < 1.0


def test_too_dear_or_not_without_reuse_is_seen() -> None:
    costs = [cost("recompute", 1, 1.0), cost("attentionstore", 1, 1.04, cached=32)]
    assert not any(verdicts(summarize(costs)).values())


def test_requests_are_new_and_repeatable() -> None:
    first, again = ([request_of(random.Random(seed)) for seed in range(20)] for _ in range(2))
    assert first == again
    assert len({request.salt for request in first}) == 20
    assert all(280 <= len(r.text.split()) <= 800 and 32 <= r.max_tokens <= 64 for r in first)


def test_of_two_servers_each_is_first_as_often_with_the_third_and_without() -> None:
    rounds = [arms_of(round_) for round_ in range(80)]
    assert [len(arms) for arms in rounds] == [len(ARMS), 2, 2, 2] * 20
    for with_third in (True, False):
        firsts = [
            arms.index("attentionstore") < arms.index("recompute") for arms in rounds if (len(arms) == 3) == with_third
        ]
        assert 2 * sum(firsts) == len(firsts)
