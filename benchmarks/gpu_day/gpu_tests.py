"""The project's own tests that need a GPU, file by file, with a line as each test ends."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from benchmarks.gpu_day.items import Asked, Item, Values

# The most telling first, since time may run out.
FILES = (
    "tests/engine/test_on_gpu.py",
    "tests/kernels/test_triton_copies.py",
    "tests/engine/model/cuda",
    "tests/kernels/test_triton_rows.py",
    "tests/kernels/test_prompts.py",
    "tests/engine/step/test_sampler.py",
    "tests/kernels/test_draws.py",
    "tests/engine/build/test_link.py",
    "tests/engine/test_coded_tiers.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/codecs",
    "tests/kernels/test_triton_packed.py",
)
_FILE_LIMIT_S, _TEST_LIMIT_S = 60, 20


class Heard:
    """A pytest plugin that records the outcome of each test."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        end = {"test": report.nodeid, "outcome": report.outcome, "s": round(report.duration, 2)}
        if report.outcome == "failed":
            lines = str(report.longreprtext).strip().splitlines()
            end |= {"error": lines[-1][:200] if lines else "failed", "where": [line[:200] for line in lines[-6:]]}
        self.ends.append(end)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.ends.append({"test": report.nodeid, "outcome": "failed", "error": "it could not be collected"})


def open_section(asked: Asked) -> Asked:
    return asked


def items(asked: Asked) -> Sequence[Item]:
    return [Item(file, _FILE_LIMIT_S, partial(run, file)) for file in FILES]


def run(file: str, asked: Asked) -> Iterator[Values]:
    """Run the GPU tests of one file and yield the outcomes. Without a GPU the tests are collected and skipped."""
    heard = Heard()
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout", str(_TEST_LIMIT_S)]
    status = pytest.main([*options, "-n", "0", file], plugins=[heard])
    yield from heard.ends
    counts = {how: sum(end["outcome"] == how for end in heard.ends) for how in ("passed", "failed", "skipped")}
    is_well = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    yield {**counts, "status": int(status)} | ({} if is_well else {"error": f"pytest ended with status {int(status)}"})
