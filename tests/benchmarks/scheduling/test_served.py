"""Tests the comparison of orders on servers: a round by stubs, and what is concluded."""

from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness.experiment import Run
from benchmarks.scheduling import served
from reprise.loadgen.measure.sender import TurnResult
from reprise.model.directories import BUNDLED


def turn(number, ttft_s, due_s=5.0, gap_s=0.02, tokens=4):
    stamps = [due_s + ttft_s + gap_s * n for n in range(tokens)]
    return TurnResult("c", number, due_s, due_s, stamps, due_s + 3.0, completion_tokens=tokens)


def rounds_of(first, returning, seeds=range(4)):
    """Seconds of each server."""
    return [
        served.round_of(arm, seed, [turn(0, first[arm]), turn(1, returning[arm]), turn(2, returning[arm])])
        for arm in first
        for seed in seeds
    ]


def test_first_and_returning_turns_are_told_apart():
    turns = [turn(0, 2.0), turn(1, 0.5, gap_s=0.1), turn(2, 0.7)]
    found = served.describe([served.round_of("due", 1, turns)])
    assert found["first"] == {"count": 1, "mean": 2000, "p50": 2000, "p95": 2000, "p99": 2000, "max": 2000}
    assert (found["returning"]["p50"], found["returning"]["mean"]) == (500, 600)
    assert (found["ttft"]["count"], found["ttft"]["max"]) == (3, 2000)
    assert (found["e2e"]["count"], found["e2e"]["max"]) == (3, 2060)
    assert (found["tpot"]["count"], found["tpot"]["p95"], found["itl"]["count"]) == (3, 100, 9)


@pytest.mark.parametrize(
    ("mine", "missed"),
    [
        ((0.9, 0.9), []),
        ((1.1, 0.9), ["TTFT p95 at most 1.0 x fcfs (1.1)"]),
        ((0.9, 1.1), [f"TTFT {f} at most 1.0 x fcfs ({x})" for f, x in (("mean", 1.0333), ("p50", 1.1), ("p95", 1.1))]),
    ],
)
def test_what_is_held_against_the_others(mine, missed):
    first, returning = ({"due": ours, "fcfs": 1.0} for ours in mine)
    row = {"kv": "hbm", "share": 1.0, **served.summarize(rounds_of(first, returning))}
    held = served.verdicts([row], 4)
    assert len(held) == 8
    lines = [line.removeprefix("KV in hbm, 100%: ") for line, holds in held.items() if not holds]
    assert [line for line in lines if line.startswith("TTFT")] == missed
    assert any(line.startswith("E2E") for line in lines) == bool(missed)
    assert row["over"]["fcfs"]["due"]["first"]["p95"] == mine[0]
    assert not all(served.verdicts([row], 3).values())


def test_every_server_plays_every_seed_at_a_share_of_what_is_carried(tmp_path, monkeypatch):
    played = []

    def play(server, conversations, seed):
        played.append((server, seed, sum(c.start_s for c in conversations) / len(conversations)))
        return [turn(n, 1.0, due_s=t.due_s) for c in conversations for n, t in enumerate(c.turns)]

    monkeypatch.setattr(served, "play", play)
    programs = {}

    def serve(name, settings, program):
        programs[name] = program
        return nullcontext(name)

    monkeypatch.setattr(served, "serve", serve)
    monkeypatch.setattr(served, "counts", lambda server: Counter({"loads hidden": len(played)}))
    words = ["--model", str(BUNDLED), "--seeds", "2", "--kv", "disk", "--shares", "0.5", "1", "--arms", "fcfs"]
    words += ["--other", "/before/bin/reprise", "due"]
    with ExitStack() as stack:
        run = Run(arguments=served.EXPERIMENT.parse(words), console=Console(quiet=True), stack=stack,
                  directory=tmp_path, write=lambda result: None)  # fmt: skip
        result = served.measure(run)
    assert programs == {"fcfs disk": None, "due disk": Path("/before/bin/reprise")}
    by_seed = [(server, seed) for server, seed, _ in played[2:]]
    carried = ("fcfs disk", 0)
    assert by_seed == 2 * [carried, ("fcfs disk", 1), ("due disk", 1), ("due disk", 2), ("fcfs disk", 2)]
    assert played[2][2] < 0.01, "what is carried: all at once"
    assert played[3][2] == pytest.approx(2 * played[8][2]), "twice the rate: half the time"
    rows = result["rows"]
    assert [(row["kv"], row["share"], row["counts"]["fcfs"]["loads hidden"]) for row in rows] == [
        ("disk", 0.5, 2), ("disk", 1.0, 2),
    ]  # fmt: skip
    assert {tuple(row["arms"]) for row in rows} == {("fcfs", "due")}
    served.show(Console(quiet=True), result)
