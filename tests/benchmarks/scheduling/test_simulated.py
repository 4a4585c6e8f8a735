"""Tests the simulated orders of the queue: what is played, and what is concluded."""

import gzip
from argparse import Namespace
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.figures.scheduling import draw, simulated_section
from benchmarks.harness.experiment import Run
from benchmarks.scheduling import simulated
from benchmarks.scheduling.simulated import Served, classes_row, describe, overtakes, play
from benchmarks.scheduling.workloads import Classes, Recorded, lognormal, varied
from reprise.scheduler.make_policy import POLICIES

SMALL = Classes(
    conversations=6, first_tokens=200, turn_tokens=50, answer_tokens=4, turns_each=2, in_hbm=3, in_dram=1, turns=20,
    new_share=0.25, new_tokens=100,
)  # fmt: skip


def test_a_fixed_share_of_the_turns_begins_conversations():
    conversations = SMALL.arrivals(2.0, "1")
    assert conversations == SMALL.arrivals(2.0, "1") != SMALL.arrivals(2.0, "2")
    assert [c.turns[0].prompt_tokens for c in conversations if int(c.session_id[2:]) >= 6] == [100] * 5
    turns = [turn for c in conversations for turn in c.turns]
    assert (len(turns), {turn.prompt_tokens for turn in turns}) == (20, {50, 100})
    played = SMALL.begun(conversations)
    assert sum(turn.due_s >= SMALL.start_s for c in played for turn in c.turns) == 20


def test_a_turn_that_started_before_an_earlier_arrival_has_overtaken_it():
    order = [(0.0, 5.0), (1.0, 2.0), (2.0, 6.0), (3.0, 4.0)]  # (due, started): the second and the fourth pass the first
    served = [Served("disk", due, started, 9.0, 0.1, 3.0) for due, started in order]
    assert overtakes(served) == [2, 0, 1, 0]
    found = describe([served, served[:1]])
    assert (found["turns"], found["most_overtakes"], found["overtakes"]) == (5, 2, {"0": 3, "1": 1, "2": 1})
    assert found["slowdown_p95"] == 3.0
    assert (found["by_place"]["disk"]["longest_wait"], found["by_place"]["new"]["turns"]) == (5000.0, 0)


def test_lengths_are_drawn_about_the_same_means_and_fit(tmp_path):
    recorded = tmp_path / "trace.csv.gz"
    recorded.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,300,30\n2,200,20\n"))
    plain = SMALL.arrivals(2.0, "1")
    for lengths, most in ((lognormal, 150), (Recorded.read(recorded), 150)):
        drawn_anew = replace(SMALL, lengths=lengths).arrivals(2.0, "1")
        said = [turn for c in drawn_anew for turn in c.turns]
        assert [t.due_s for t in said] == [t.due_s for c in plain for t in c.turns]
        assert len({t.prompt_tokens for t in said}) > 3
        assert 0.5 < sum(t.prompt_tokens for t in said) / sum(t.prompt_tokens for c in plain for t in c.turns) < 2
        cut = varied(plain, lengths, "1", most)
        assert max(sum(t.prompt_tokens + t.answer_tokens for t in c.turns) for c in cut) <= most


@pytest.mark.parametrize("order", POLICIES)
def test_all_classes_are_played(order):
    row = classes_row(SMALL, 3.0, 2.0, prefill_s=0.03)
    machine = replace(row.machine, policy=order)
    served = [play(machine, row.conversations(seed), seed, row.start_s) for seed in range(4)]
    assert all(len(each) == SMALL.turns for each in served)
    assert {turn.place for each in served for turn in each} >= {"hbm", "new", "disk"}


@pytest.mark.bench
def test_the_program_runs_and_is_drawn(tmp_path):
    def run(words):
        arguments = simulated.EXPERIMENT.parse(words)
        return simulated.measure(
            Run(arguments=arguments, console=Console(quiet=True), stack=Namespace(enter_context=lambda bar: bar),
                directory=tmp_path, write=lambda result: None)
        )  # fmt: skip

    result = run(["--rounds", "2", "--turns", "10", "--rows", "1", "--processes", "1"])
    (row,) = result["rows"]
    assert set(row["ttft_ms"]) == {*POLICIES, "due-4", "due-16"}
    assert {"due/fcfs", "due/car", "due/due-16", "car/fcfs"} <= set(row["ratios"])
    assert "due: longest wait at most 1.6 x fcfs" in result["held"]
    for found in (row["ratios"], row["ratios_by_kind"]["returning"]):
        ratio, low, high = found["car/fcfs"]["mean"]
        assert low <= ratio <= high
    simulated.show(Console(quiet=True), result)
    draw(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    arms = row["ttft_ms"]
    earlier = {"car-hidden": arms["due"], "priority": arms["car"], "fcfs": arms["fcfs"]}
    draw({"rows": [row | {"ttft_ms": earlier}]}, tmp_path / "earlier.png")
    assert (tmp_path / "earlier.png").stat().st_size > 10_000, "results of policies that were removed since"
    assert any(line.startswith("- due/fcfs: mean") for line in simulated_section(result, "here"))
