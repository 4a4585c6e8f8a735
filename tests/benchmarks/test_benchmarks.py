"""Tests that every benchmark prints its help, that its small form uses existing options, and that claims can be
measured again."""

import importlib
import re
import shlex

import pytest

from benchmarks.claims.read import claims
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.result_files import ROOT

TEXTS = {
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "benchmarks").rglob("*.py"))
}
NAMES = [name for name, text in TEXTS.items() if "\nEXPERIMENT = " in text]
WITH_SMALL_FORM = [name for name in NAMES if "quick=Quick(" in TEXTS[name]]
NEEDED = {"equality": ["--data", "d"], "replay_dialogues": ["--data", "d"], "truncation": ["--data", "d"],
          "other_tree": ["--other", "p"],
          "texts": ["--data", "d"], "drafts": ["--data", "d"], "int8_pages": ["--data", "d"]}  # fmt: skip


@pytest.fixture(params=NAMES)
def benchmark(request) -> Experiment:
    return importlib.import_module(request.param).EXPERIMENT


def words(benchmark: Experiment, *more: str) -> list[str]:
    """Return the words that a benchmark cannot be started without."""
    folder, name = re.findall(r"python -m benchmarks\.(\w+)[. ](\w+)", benchmark.about or "")[0]
    return [*NEEDED.get(folder, NEEDED.get(name, [])), *more]


@pytest.fixture(autouse=True)
def every_model_is_there(monkeypatch):
    """Options name SmolLM2, which `make setup` cannot bring everywhere; nothing here reads it."""
    monkeypatch.setattr("benchmarks.harness.models.is_there", lambda directory: True)


def test_its_description_says_how_it_is_started(benchmark):
    assert re.search(r"python -m benchmarks\.\w+[. ]\w+", benchmark.about)
    assert "usage:" in benchmark.parser().format_help()


def test_it_has_the_options_that_all_have(benchmark):
    arguments = benchmark.parse(words(benchmark, "--no-result", "--name", "tried"))
    assert arguments.no_result
    assert benchmark.file_name(arguments) == "tried"
    assert re.fullmatch(r"\w+", benchmark.file_name(benchmark.parse(words(benchmark))))


@pytest.mark.parametrize("name", WITH_SMALL_FORM)
def test_its_small_form_asks_for_options_that_there_are(name):
    benchmark = importlib.import_module(name).EXPERIMENT
    usual, small = benchmark.parse(words(benchmark)), benchmark.parse(words(benchmark, "--quick"))
    assert usual.__dict__.keys() == small.__dict__.keys()
    assert {name: getattr(small, name) for name in benchmark.quick.options} == dict(benchmark.quick.options)
    assert benchmark.file_name(usual) == benchmark.file_name(small)


def test_every_claim_can_be_measured_again():
    """The command of each takes its options still, and writes the result that was committed."""
    commands = {claim.result: claim.command for claim in claims()}
    for result, command in commands.items():
        _, _, module, *options = shlex.split(command)
        if module in ("benchmarks.fleet", "benchmarks.texts"):  # their first word names the program
            module = f"{module}.{options.pop(0)}"
        benchmark = importlib.import_module(module).EXPERIMENT
        assert benchmark.file_name(benchmark.parse(options)) == result, command
