"""Runs the speed programs of single wings whole, in their smallest form, and tests that each judgement can fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.streams import StreamedAnswer
from benchmarks.speed import activations, codec, int8_pages, selectors, truncation, weights
from tests.benchmarks.texts.test_programs import failed

SMALL = {
    activations: ["--tokens", "512", "--rounds", "1"],
    codec: ["--tokens", "64", "--rounds", "1", "--blocks", "2", "--arms", "raw"],
    int8_pages: ["--tokens", "64", "--rounds", "1"],
    selectors: ["--contexts", "64", "--rounds", "1", "--steps", "1"],
    weights: ["--rounds", "1"],
}


@pytest.mark.bench
@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__.split(".")[-1])
def test_it_runs_whole(module: Any, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "bundled"
    if module in (activations, weights):
        model = str(tmp_path / "model")
        shape = replace(SHAPES["tiny"], kv_heads=SHAPES["tiny"].heads)
        make_model(Path(model), shape, seed=0)
        monkeypatch.setattr(activations, "share", lambda arms: 0.1)  # share of times too short to be told apart
        monkeypatch.setattr(weights, "LAYERS", shape.layers)
        monkeypatch.setattr(weights, "ARMS", {"hbm": None, "1 GB/s": (1.0, 0)})
    if module is int8_pages:
        small = {"CASES": ((64, 1), (64, 2)), "PROMPTS": (64,), "TEXT": 128, "WORDS": range(1000, 4000), "SPARE": 512}
        for name, value in small.items():
            monkeypatch.setattr(int8_pages, name, value)
    threads = torch.get_num_threads()
    words = ["--model", model, "--no-result", *SMALL[module], *(["--data", str(data)] if module is int8_pages else [])]
    assert module.EXPERIMENT.main(words) in (0, 1)
    torch.set_num_threads(threads)


def served(ttft_ms: float, truncated: int = 0, shifted: int = 0, recalled: int = 0) -> StreamedAnswer:
    found = {"truncated_tokens": truncated, "shifted_tokens": shifted, "recalled_tokens": recalled}
    return StreamedAnswer(
        first_token_s=ttft_ms / 1e3, completion_tokens=32, prompt_tokens=500, x_cache={**found, "computed_tokens": 20}
    )


def test_turns_that_overflow_are_held_against_those_after_the_first_cut() -> None:
    # Two slow turns before the first cut count for nothing: the context was shorter.
    fills = [served(900), served(900)]
    cycle = [(12.0, 512), (10.0, 512), (10.0, 512), (12.0, 1024), (10.0, 1024), (10.0, 1024)]
    rows = truncation.rows_of(fills + [served(ms, truncated) for ms, truncated in cycle])
    summary = truncation.summarize_endless({"AS": rows, "TT": rows}, 32)
    ours = summary["AS"]
    assert (ours["cuts"], ours["truncated_tokens"], ours["served"]) == (2, 1024, 8)
    assert (ours["overflow_ratio"], ours["late_ratio"]) == (pytest.approx(1.2), pytest.approx(1.0))
    assert failed(truncation.verdicts({"endless": {"summary": summary}})) == 0
    ours |= {"served": 7, "only_grows": False, "overflow_ratio": 1.31, "late_ratio": 1.31}
    assert failed(truncation.verdicts({"endless": {"summary": summary}})) == 4
    with pytest.raises(ValueError, match="overflowed"):
        truncation.summarize_endless({"AS": truncation.rows_of(fills)}, 32)


def test_shortened_and_recalled_turns_are_judged() -> None:
    before = [served(1)] * (truncation.FIRST_SHORTENED - 1)
    turns = {
        "client_shift": truncation.rows_of([*before, *(served(ms, shifted=400) for ms in (30, 40, 50))]),
        "recompute": truncation.rows_of([*before, *(served(ms) for ms in (100, 80, 120))]),
    }
    shortened = truncation.summarize_shortened(turns)
    assert (shortened["ratio"], shortened["arms"]["client_shift"]["turns"]) == (pytest.approx(0.4), 3)
    # Only turns that recalled and cut nothing are compared: the second.
    off, on = ([served(50), served(ms), served(20), served(99)] for ms in (10, 12))
    on[1:] = [served(12, recalled=64), served(22), served(500, 512, recalled=64)]
    rows = {"recall": truncation.rows_of(on), "off": truncation.rows_of(off)}
    recall = truncation.summarize_recall(rows, 1)
    assert recall == {"turns": 1, "recalled_tokens": 64, "ttft_ms": {"recall": 12, "off": 10}, "ratio": 1.2}
    with pytest.raises(ValueError, match="nothing was recalled"):
        truncation.summarize_recall({"recall": rows["off"], "off": rows["off"]}, 0)
    parts = {"shortened": {"summary": shortened}, "recall": {"summary": recall}}
    assert failed(truncation.verdicts(parts)) == 0
    assert failed(truncation.verdicts({name: {"summary": {"ratio": 1.31}} for name in parts})) == 2
