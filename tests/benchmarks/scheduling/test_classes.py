"""Tests the workload with all three of CaR's classes, and the evaluation of its turns."""

from argparse import Namespace
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.figures import classes as classes_figure
from benchmarks.harness.experiment import Run
from benchmarks.scheduling import classes, classes_foretold
from benchmarks.scheduling.classes_workload import PLACES, POLICIES, Mix, Served, arrivals, describe, overtakes
from benchmarks.scheduling.legs import Shape
from reprise.loadgen.measure.sender import TurnResult

SHAPE = Shape(conversations=6, first_tokens=200, turn_tokens=50, answer_tokens=4, turns=2)
MIX = Mix(SHAPE, turns=20, new_share=0.25, new_tokens=100)
MEASURED = {
    "calibration": {"prefill_s": 0.03, "window": 4},
    "workload": {
        "conversations": 6, "first_tokens": 200, "turn_tokens": 50, "answer_tokens": 4, "turns_per_leg": 2,
        "in_hbm": 3, "in_dram": 1,
    },
}  # fmt: skip


def test_a_fixed_share_of_the_turns_begins_conversations():
    for seed in range(20):
        conversations = arrivals(MIX, 2.0, str(seed), "c")
        firsts = [c.turns[0].prompt_tokens for c in conversations if int(c.session_id[2:]) >= SHAPE.conversations]
        assert firsts == [100] * 5
        turns = [turn for c in conversations for turn in c.turns]
        assert len(turns) == 20
        assert sorted({turn.prompt_tokens for turn in turns}) == [50, 100]
        assert all(list(c.turns) == sorted(c.turns, key=lambda turn: turn.due_s) for c in conversations)
    assert arrivals(MIX, 2.0, "1", "c") == arrivals(MIX, 2.0, "1", "c")


def test_who_started_before_an_earlier_arrival_has_overtaken_it():
    order = [(0.0, 5.0), (1.0, 2.0), (2.0, 6.0), (3.0, 4.0)]  # (due, started): the second and the fourth pass the first
    served = [Served("disk", due, started, 9.0) for due, started in order]
    assert overtakes(served) == [2, 0, 1, 0]
    found = describe([served, served[:1]])
    assert (found["turns"], found["most_overtakes"], found["overtakes"]) == (5, 2, {"0": 3, "1": 1, "2": 1})
    assert found["by_place"]["disk"]["longest_wait"] == 5000.0
    assert found["by_place"]["new"]["turns"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_all_classes_are_played_and_the_window_keeps_its_bound(policy):
    machine = classes_foretold.machines(MEASURED, MIX, 3.0)[policy]
    rate = 2 * classes_foretold.service_rate(machine, MIX)
    served = [classes_foretold.play(machine, MIX, arrivals(MIX, rate, str(seed), "c"), seed) for seed in range(4)]
    assert all(len(each) == MIX.turns for each in served)
    assert {turn.place for each in served for turn in each} == set(PLACES)
    most = max(count for each in served for count in overtakes(each))
    if policy.startswith("car"):  # with one tenant, who came later entered later
        assert most <= machine.window - 1


@pytest.mark.bench
def test_a_row_is_drawn_and_told(tmp_path):
    found = classes_foretold.row(2, {**MEASURED}, (100, 1.0, 1.0))
    assert set(found["ttft_ms"]) == set(POLICIES)
    for low_high in found["ratios"]["car/fcfs"].values():
        assert low_high[1] <= low_high[0] <= low_high[2]
    classes_figure.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len(classes_figure.table([found])) == 2 + len(POLICIES)
    assert len(classes_figure.ratios([found])) == 2 + 3
    sure, unsure = [0.5, 0.4, 0.9], [1.0, 0.9, 1.1]
    rows = [{"ratios": {"a/b": {"mean": sure, "p50": unsure, "p95": [2.0, 1.5, 3.0]}}},
            {"ratios": {"a/b": {"mean": sure, "p50": unsure, "p95": unsure}}}]  # fmt: skip
    assert classes_figure.verdicts(rows) == [
        "- a/b: mean 0.50 to 0.50 (2 better, 0 worse); p50 1.00 to 1.00 (0 better, 0 worse); "
        "p95 1.00 to 2.00 (0 better, 1 worse)"
    ]


def test_a_server_s_answer_says_where_the_history_was():
    result = TurnResult("c-1", 1, 10.0, sent_s=10.5, token_s=[12.0])
    for cache, place in (
        ({}, "new"), ({"hbm_tokens": 50}, "hbm"), ({"hbm_tokens": 50, "disk_tokens": 9}, "disk"),
        ({"dram_tokens": 50, "disk_tokens": 9}, "dram"),
    ):  # fmt: skip
        answer = replace(result, extra={"x_cache": cache, "timings": {"queue_ms": 1000.0}})
        assert classes.served(answer) == Served(place, 10.0, 11.5, 2.0)


class Played:
    """A server that starts every turn a second late, and what was asked of it."""

    def __init__(self, server, policy, shape):
        self.policy, self.begun, self.forgotten, self.played = policy, [], [], []

    def warm_up(self): ...
    def rest(self): ...

    def begin(self, prefix, seed):
        self.begun.append(prefix)
        return 2.0

    def play(self, conversations, seed):
        self.played.append(conversations)
        return [
            TurnResult(c.session_id, n, turn.due_s, sent_s=turn.due_s, token_s=[turn.due_s + 2.0],
                       extra={"timings": {"queue_ms": 1000.0}})
            for c in conversations for n, turn in enumerate(c.turns)
        ]  # fmt: skip

    def counts(self):
        return Counter({"overtakes": len(self.played)})

    def state(self):
        return {"window": 5}

    def forget(self):
        self.forgotten.append(len(self.played))


def test_four_servers_play_the_same_legs(tmp_path, monkeypatch):
    players = {}

    def player(server, policy, shape):
        return players.setdefault(policy, Played(server, policy, shape))

    monkeypatch.setattr(classes, "Player", player)
    monkeypatch.setattr(classes, "serve", lambda name, settings: nullcontext())
    monkeypatch.setattr(classes, "settings_of", lambda policy, *rest: {"scheduler.policy": policy})
    monkeypatch.setattr(classes, "throttle", lambda *rest: (0.1, 0.5))
    monkeypatch.setattr(classes, "kv_bytes_per_token", lambda model: 1)
    monkeypatch.setattr(classes, "bursts", lambda *rest: (0.1, 4.0, 3.0))
    with ExitStack() as stack:
        run = Run(
            arguments=Namespace(rounds=2, model="model"), console=Console(quiet=True), stack=stack, directory=tmp_path,
            write=lambda result: None,
        )  # fmt: skip
        found = classes.play(run, MIX)
    assert set(players) == set(POLICIES)
    played = [player.played for player in players.values()]
    assert all(each == played[0] for each in played)
    assert len(played[0]) == 2 * len(classes.SHARES)
    assert all(player.forgotten == [1, 2, 3, 4] for player in players.values())
    # Three of four turns return, 4 a second; a quarter begin, six of them in 3 s. Legs are begun in 2 s instead of 3.
    assert found["calibration"]["service_rate"] == round(1 / (0.75 / 4 + 0.25 * 3 / 6), 3)
    assert [row["share"] for row in found["rows"]] == list(classes.SHARES)
    for row in found["rows"]:
        assert row["ttft_ms"]["car"]["turns"] == 2 * MIX.turns
        assert row["ttft_ms"]["car"]["mean"] == 2000.0
        assert row["ttft_ms"]["car"]["longest_wait"] == 1000.0
        assert row["ratios"]["car/fcfs"]["p95"] == [1.0, 1.0, 1.0]
        assert row["counts"]["car"] == [{"overtakes": 1}, {"overtakes": 1}]
