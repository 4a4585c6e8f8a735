"""Runs every program of `benchmarks.texts` whole, in its smallest form, and tests that each judgement can fail."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.experiment import Experiment
from benchmarks.harness.make_model import BUNDLED
from benchmarks.texts import after_cut, codecs, cuts, drift, keeping, packed_weights, selectors

SMALL = {
    codecs: ["--tokens", "192"],
    cuts: ["--windows", "1", "--scored", "32", "--questions", "1"],
    drift: ["--texts", "1", "--conversations", "1", "--turn-tokens", "32"],
    keeping: ["--windows", "1", "--scored", "32", "--questions", "1"],
    packed_weights: ["--tokens", "512"],
    selectors: ["--texts", "1", "--histories", "128", "--needles", "1"],
}


@pytest.mark.bench
@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__.split(".")[-1])
def test_it_runs_whole(module: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "HISTORIES", (64,))
    monkeypatch.setattr(selectors, "HAYSTACK", 600)
    monkeypatch.setattr(selectors, "SCORED", 4)
    monkeypatch.setattr(after_cut, "is_answerable", lambda history, question: True)
    right = dict.fromkeys(("oldest", "attended", keeping.RECALL), (True, -1.0))
    monkeypatch.setattr(keeping.Asker, "answers", lambda *_: right)
    if hasattr(module, "calibration_text"):  # a part of it will do
        parts = [[text[:192] for text in part[:2]] for part in module.calibration_text(BUNDLED / "tokenizer.json")]
        monkeypatch.setattr(module, "calibration_text", lambda tokenizer: parts)
    experiment: Experiment = module.EXPERIMENT
    words = ["--data", str(data), "--model", "bundled", "--no-result", *SMALL[module]]
    threads = torch.get_num_threads()
    assert experiment.main(words) in (0, 1)
    torch.set_num_threads(threads)


def failed(held: dict[str, bool]) -> int:
    return [*held.values()].count(False)


def test_codecs_are_judged() -> None:
    rows = {
        f"transform {budget}": {"kl": budget, "bytes_of_raw": 0.18, "same_choice": 0.98} for budget in codecs.BUDGETS
    }
    rows = {name: row | {"perplexity_change": -0.002} for name, row in rows.items()}
    rows["kivi4"] = {"kl": 0.0011, "bytes_of_raw": 0.31}
    assert failed(codecs.verdicts(rows)) == 0
    worse = {name: {**row, "kl": 0.005, "bytes_of_raw": 0.4} for name, row in rows.items()}
    worse["transform 0.001"] |= {"same_choice": 0.97, "perplexity_change": 0.003}
    assert failed(codecs.verdicts(worse)) == 7
    assert failed(codecs.verdicts({"kivi4": rows["kivi4"]})) == 2


def test_drift_is_judged() -> None:
    right, wrong = (True, -0.1), (False, -3.0)
    asked = {"raw": [right] * 100, "coded": [right] * 98 + [wrong] * 2}
    assert failed(drift.summarize([[0.001] * 9 + [0.0029]], asked)["held"]) == 0
    asked = {"raw": [right] * 99, "coded": [right] * 90 + [wrong] * 9}
    assert failed(drift.summarize([[0.001] * 9 + [0.0031]], asked)["held"]) == 3


def test_cuts_are_judged() -> None:
    def parts(apart: float, naive: float, right: float) -> dict[str, Any]:
        ratios = {"AS": 1.0, "AS bf16": 1.0, "AS hops": 1 + apart, "TT": 1.0, "NKVT": naive}
        texts = {"books": {"arms": {arm: {"ratio_to_tt": ratio} for arm, ratio in ratios.items()}}}
        arms = {arm: {"accuracy": accuracy} for arm, accuracy in (("AS", right), ("TT", 0.9), ("NKVT", 0.5))}
        return {"perplexity": {"texts": texts}, "retrieval": {"arms": arms}}

    assert failed(cuts.verdicts(parts(0.009, 1.2, 0.86))) == 0
    assert failed(cuts.verdicts(parts(-0.011, 1.05, 0.5))) == 4


def test_keeping_is_judged() -> None:
    def parts(attended: float, recalled: float, ratio: float) -> dict[str, Any]:
        texts = {"books": {"arms": {"attended": {"ratio_to_oldest": ratio}}}}
        right = {"oldest": 0.3, "attended": attended, keeping.RECALL: recalled}
        arms = {arm: {"accuracy": accuracy} for arm, accuracy in right.items()}
        return {"perplexity": {"texts": texts}, "names": {"arms": arms}}

    assert failed(keeping.verdicts(parts(0.46, 0.7, 1.005))) == 0
    assert failed(keeping.verdicts(parts(0.44, 0.69, 1.006))) == 3
