"""Tests the comparison of orders on servers: a round by stubs, and what is concluded."""

from collections import Counter
from contextlib import ExitStack, nullcontext

import pytest
from rich.console import Console

from benchmarks.harness.experiment import Run
from benchmarks.scheduling import served
from reprise.loadgen.measure.sender import TurnResult
from reprise.model.directories import BUNDLED


def turn(number, ttft_s, due_s=5.0, gap_s=0.02, tokens=4):
    stamps = [due_s + ttft_s + gap_s * n for n in range(tokens)]
    return TurnResult("c", number, due_s, due_s, stamps, stamps[-1], completion_tokens=tokens)


def rounds_of(first, returning, seeds=range(4)):
    """Seconds of each server."""
    return [
        served.round_of(arm, seed, [turn(0, first[arm]), turn(1, returning[arm]), turn(2, returning[arm])])
        for arm in first
        for seed in seeds
    ]


def test_first_and_returning_turns_are_told_apart():
    turns = [turn(0, 2.0), turn(1, 0.5, gap_s=0.1), turn(2, 0.7)]
    found = served.describe([served.round_of("due-0", 1, turns)])
    assert found["first"] == {"count": 1, "mean": 2000, "p50": 2000, "p95": 2000, "p99": 2000}
    assert (found["returning"]["p50"], found["returning"]["mean"]) == (500, 600)
    assert (found["tpot"]["count"], found["tpot"]["p95"], found["itl"]["count"]) == (3, 100, 9)


@pytest.mark.parametrize(
    ("mine", "held"),
    [((0.9, 0.9), [True] * 4), ((1.1, 0.9), [True, True, False, True]), ((0.9, 0.97), [True, False, True, True])],
)
def test_what_is_held_against_the_other(mine, held):
    first, returning = ({"due-auto": ours, "fcfs-0": 1.0} for ours in mine)
    summary = served.summarize(rounds_of(first, returning))
    assert list(summary["held"].values()) == held
    assert summary["over_fcfs-0"]["due-auto"]["first"]["p95"] == mine[0]


def test_every_server_plays_every_seed(tmp_path, monkeypatch):
    played = []

    def play(server, conversations, seed):
        played.append((server, seed, len(conversations)))
        return [turn(n, 1.0, due_s=t.due_s) for c in conversations for n, t in enumerate(c.turns)]

    monkeypatch.setattr(served, "play", play)
    monkeypatch.setattr(served, "serve", lambda arm, settings: nullcontext(arm))
    monkeypatch.setattr(served, "counts", lambda server: Counter({"loads hidden": len(played)}))
    words = ["--model", str(BUNDLED), "--seeds", "2", "--turns", "3", "--rate", "2",
             "--arms", "due-auto", "fcfs-0"]  # fmt: skip
    with ExitStack() as stack:
        run = Run(arguments=served.EXPERIMENT.parse(words), console=Console(quiet=True), stack=stack,
                  directory=tmp_path, write=lambda result: None)  # fmt: skip
        result = served.measure(run)
    assert [(server, seed) for server, seed, _ in played[2:]] == [
        ("due-auto", 1), ("fcfs-0", 1), ("fcfs-0", 2), ("due-auto", 2),
    ]  # fmt: skip
    assert (result["seeds"], result["counts"]["fcfs-0"]["loads hidden"]) == ([1, 2], 2)
    assert set(result["arms"]) == {"due-auto", "fcfs-0"}
    served.show(Console(quiet=True), result)
