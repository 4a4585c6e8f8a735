"""Tests that every benchmark prints its help, and that its small form uses existing options."""

import importlib
import re

import pytest

from benchmarks.harness.experiment import Experiment
from benchmarks.harness.result_files import ROOT

FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
NAMES = [
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for file in FILES
    if "\nEXPERIMENT = " in file.read_text(encoding="utf-8")
]
NEEDED = {"equality": ["--data", "d"], "replay_dialogues": ["--data", "d"], "truncation": ["--data", "d"],
          "eviction_limit": ["--trace", "t"]}  # fmt: skip


@pytest.fixture(params=NAMES)
def benchmark(request) -> Experiment:
    return importlib.import_module(request.param).EXPERIMENT


def words(benchmark: Experiment, *more: str) -> list[str]:
    """What it cannot be started without."""
    needed = re.findall(r"python -m benchmarks\.\w+\.(\w+)", benchmark.about or "")
    return [*NEEDED.get(needed[0], []), *more]


def test_its_description_says_how_it_is_started(benchmark):
    assert re.search(r"python -m benchmarks\.\w+\.\w+", benchmark.about)
    assert "usage:" in benchmark.parser().format_help()


def test_it_has_the_options_that_all_have(benchmark):
    arguments = benchmark.parse(words(benchmark, "--no-result", "--name", "tried"))
    assert arguments.no_result
    assert benchmark.file_name(arguments) == "tried"
    assert re.fullmatch(r"\w+", benchmark.file_name(benchmark.parse(words(benchmark))))


def test_its_small_form_asks_for_options_that_there_are(benchmark):
    if benchmark.quick is None:
        pytest.skip("it has none")
    usual, small = benchmark.parse(words(benchmark)), benchmark.parse(words(benchmark, "--quick"))
    assert usual.__dict__.keys() == small.__dict__.keys()
    assert {name: getattr(small, name) for name in benchmark.quick.options} == dict(benchmark.quick.options)
    assert benchmark.file_name(usual) == benchmark.file_name(small)
