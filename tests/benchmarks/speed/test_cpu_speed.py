"""Tests what is concluded of the time that decode steps take."""

import pytest

from benchmarks.speed import cpu_speed


@pytest.mark.parametrize(("q8", "share", "held"), [(0.6, 0.7, [True] * 3), (0.61, 0.69, [False] * 3)])
def test_packed_weights_are_held_against_bf16_and_memory(q8, share, held):
    arms = {arm: {"tpot_ms": {"median": ms}, "share_of_memory_speed": share} for arm, ms in (("bf16", 1.0), ("q8", q8))}
    assert list(cpu_speed.verdicts([{"streams": 1, "context": 16, "arms": arms}]).values()) == held
