"""Every fault of `benchmarks.fleet.faults` once, on a fleet of real processes with the bundled model."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.fleet.faults import EXPERIMENT, measure
from benchmarks.harness.experiment import Run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_trouble_of_redis_is_not_seen_by_clients(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    arguments = EXPERIMENT.parse(["--quick"])
    with ExitStack() as stack:
        console = Console(quiet=True)
        run = Run(arguments=arguments, console=console, stack=stack, directory=tmp_path, write=lambda result: None)
        result = measure(run)
    assert result["bad"] == [], "errors and wrong texts"
    assert result["all"]["redis"]["turns"] >= 100
    assert result["all"]["redis"]["redis_tokens"] > 0, "KV came out of Redis"
    assert result["flipped_bits"] > 0
    assert result["fields_cut_short"] > 0
    for name, course in result["faults"].items():
        assert course["recovered_s"] is not None, name
        assert course["heads_missing"] == 0, name
    assert result["faults"]["directory flushed"]["heads"] > 0
