"""Tests what the benchmark of the modes concludes of `reprise load`."""

import argparse

import pytest

from benchmarks.speed import modes
from reprise.loadgen.measure.sender import TurnResult


def results(ttft_s: float) -> list[TurnResult]:
    return [TurnResult("c", turn, 1.0, 1.0, [1.0 + ttft_s * (turn + 1)], 9.0) for turn in range(3)]


@pytest.mark.parametrize(("mine", "failed", "held"), [(0.1, 0, [True] * 3), (0.4, 1, [False, False, True])])
def test_what_the_modes_conclude(mine, failed, held):
    times = {"attentionstore": mine, "fcfs": 9.0, "prefix": 0.3, "recompute": 0.5}
    arms = {
        name: {"later_ttft_ms": modes.later_ttft(results(s)), "summary": {"requests": {"failed": failed}}}
        for name, s in times.items()
    }
    assert list(modes.verdicts(arms).values()) == held


def test_every_round_is_another_workload():
    words = argparse.Namespace(conversations=3, think_s=1.0)
    first, second = (modes.load_run.workload(modes.options_of(words, round_)).conversations for round_ in range(2))
    assert first != second
    assert all(len(c.turns) <= modes.MOST_TURNS for c in first)
    assert {turn.answer_tokens for c in first for turn in c.turns} == {32}


def test_all_modes_have_the_same_memory():
    for arm in modes.ARMS:
        memory = modes.memory_of(arm, most_tokens=3000, bytes_per_token=12_288)
        held = memory["cache.hbm_tokens"] * 12_288 + memory.get("cache.dram_gib", 0) * modes.GIB
        held += memory.get("experiment.staging_mib", 0) * modes.MIB
        assert held == pytest.approx(3 * 3000 * 12_288, abs=modes.MIB), "whole MiB of staging"
