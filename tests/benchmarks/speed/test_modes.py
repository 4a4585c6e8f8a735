"""Tests what the benchmark of the modes concludes of `reprise load`."""

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


def test_all_modes_have_the_same_memory():
    for arm in modes.ARMS:
        memory = modes.memory_of(arm, most_tokens=3000, bytes_per_token=12_288)
        held = memory["cache.hbm_tokens"] * 12_288 + memory.get("cache.dram_gib", 0) * modes.GIB
        held += memory.get("experiment.staging_mib", 0) * modes.MIB
        assert held == pytest.approx(3 * 3000 * 12_288, abs=modes.MIB), "whole MiB of staging"
