"""Tests that the gateway's benchmark runs whole, and that what it holds can fail."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness.experiment import Run
from benchmarks.speed.gateway import ARMS, EXPERIMENT, Arm, summarize


def judged(gateway_s: float, gap_s: float, cpu_us: float) -> dict[str, bool]:
    figures = dict(zip(ARMS, ((0.001, 0.02, 0.0), (gateway_s, gap_s, cpu_us)), strict=True))
    arms = {name: Arm(0, 0, None, [first], [gap], [cpu]) for name, (first, gap, cpu) in figures.items()}
    held: dict[str, bool] = summarize(arms, 1 << 20)["held"]
    return held


def test_what_is_held_can_fail():
    assert list(judged(0.002, 0.024, 100.0).values()) == [True] * 3
    assert list(judged(0.0026, 0.0242, 101.0).values()) == [False] * 3


@pytest.mark.servers
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_its_smallest_form_runs_whole(tmp_path: Path):
    pytest.importorskip("redis")
    words = ["--rounds", "1", "--requests", "2", "--streams", "2", "--chunks", "4", "--gap-ms", "1"]
    with ExitStack() as stack:
        run = Run(arguments=EXPERIMENT.parse(words), console=Console(quiet=True), stack=stack, directory=tmp_path,
                  write=lambda result: None)  # fmt: skip
        result = EXPERIMENT.measure(run)
    assert result["arms"]["gateway"]["first_chunk_ms"]["p50"] > 0
    assert result["cpu_us_per_chunk"]["median"] >= 0
