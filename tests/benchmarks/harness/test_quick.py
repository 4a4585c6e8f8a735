"""Tests the comparison of a small form's results with the committed ones."""

import pytest

from benchmarks.harness import quick
from benchmarks.harness.experiment import Experiment, Figure, Quick
from benchmarks.harness.quick import BETTER, FAILED, OK, STANDING, UNKNOWN, WITH_DATA, WORSE, compare, verdict
from benchmarks.harness.result_files import RESULTS, read_result


def figure(tolerance: float, *, more_is_better: bool = False) -> Figure:
    return Figure("ratio", lambda result: result["ratio"], tolerance, more_is_better)


@pytest.mark.parametrize(
    ("committed", "now", "more_is_better", "found"),
    [
        (0.10, 0.125, False, OK),
        (0.10, 0.126, False, WORSE),
        (0.10, 0.079, False, BETTER),
        (2.00, 1.61, True, OK),
        (2.00, 1.59, True, WORSE),
        (2.00, 2.51, True, BETTER),
        (0.00, 0.00, False, OK),
        (0.00, 0.01, False, WORSE),
        (1.00, 0.00, True, WORSE),
        (None, 0.50, False, UNKNOWN),
        (0.10, None, False, FAILED),
        (0.10, float("nan"), False, FAILED),
    ],
)
def test_a_figure_may_get_worse_by_its_tolerance(committed, now, more_is_better, found):
    assert verdict(figure(1.25, more_is_better=more_is_better), committed, now) == found


def stub(*figures: Figure, holds: bool = True) -> Experiment:
    small = Quick(options={}, figures=figures, holds=holds)
    return Experiment(name="stub", about=None, measure=lambda run: {}, show=lambda *_: None, quick=small)


def test_what_does_not_hold_is_worse_and_is_named():
    now = {"ratio": 1.0, "held": {"no errors": True, "identical text": False}}
    rows = compare("stub", stub(figure(1.1)), {"ratio": 1.0}, now)
    assert [(row.figure, row.verdict) for row in rows] == [("ratio", OK), ("identical text", WORSE)]
    assert [row.now for row in rows] == ["1", "1 of 2"]
    assert len(compare("stub", stub(figure(1.1), holds=False), {"ratio": 1.0}, now)) == 1


@pytest.mark.parametrize("name", [*STANDING, *WITH_DATA])
def test_the_figures_of_small_forms_can_be_read_from_the_committed_results(name):
    experiment = quick.importlib.import_module(f"benchmarks.{name}").EXPERIMENT
    assert experiment.quick is not None
    words = ["--data", "d"] if name in WITH_DATA else []
    committed = read_result(RESULTS / f"{experiment.file_name(experiment.parse(words))}.json")
    assert committed is not None, "what a small form is compared with is committed"
    for one in experiment.quick.figures:
        found = one.read(committed)
        assert found is not None, one.label
        assert verdict(one, found, found) == OK
    assert experiment.quick.figures or committed["held"]


def test_a_benchmark_that_breaks_says_where_its_log_is(tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "QUICK", tmp_path)
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    (row,) = quick.run("scheduling.simulated", ["--rounds", "0"])
    assert row.verdict == FAILED
    assert row.figure.endswith("scheduling_simulated.log")
    assert (tmp_path / "scheduling_simulated.log").stat().st_size > 0
