"""Tests what all benchmarks share, with arms that take no time."""

import json
from argparse import ArgumentParser
from collections import Counter

import pytest

from benchmarks.harness import experiment
from benchmarks.harness.experiment import Experiment, Figure, Quick, Run, turned
from benchmarks.harness.result_files import ROOT, command_line, write_result


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(experiment, "QUICK", tmp_path / "quick")
    monkeypatch.setattr(experiment, "commit", lambda: "abc")
    return tmp_path


def play(run: Run) -> dict:
    played = []
    for number, order in run.rounds(run.arguments.arms, run.arguments.rounds):
        played += [(number, arm) for arm in order]
        run.keep({"played": played})
    return {
        "played": played,
        "limit": run.arguments.limit,
        "held": {"short enough": len(played) <= run.arguments.limit},
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=9)


STUB = Experiment(
    name="stub", about="A stub.", measure=play, show=lambda console, result: None, options=options, rounds=3,
    arms=("a", "b", "c"),
    quick=Quick(options={"rounds": 1, "limit": 2}, figures=[Figure("x", lambda result: 1.0, 1.1)]),
)  # fmt: skip


def test_every_arm_plays_in_every_round_and_each_is_first_in_its_turn(folders):
    assert STUB.main([]) == 0
    result = json.loads((folders / "results" / "stub.json").read_text())
    assert result["played"] == [
        [0, "a"],
        [0, "b"],
        [0, "c"],
        [1, "b"],
        [1, "c"],
        [1, "a"],
        [2, "c"],
        [2, "a"],
        [2, "b"],
    ]


def test_a_result_says_where_and_how_it_was_made(folders):
    STUB.main(["--rounds", "1"])
    result = json.loads((folders / "results" / "stub.json").read_text())
    assert list(result)[:4] == ["benchmark", "command", "finished", "machine"]
    assert result["benchmark"] == "stub"
    assert {"cpu", "cores", "python", "packages", "commit"} <= result["machine"].keys()


def test_what_does_not_hold_is_the_exit_status(folders):
    assert STUB.main(["--limit", "8"]) == 1
    assert json.loads((folders / "results" / "stub.json").read_text())["held"] == {"short enough": False}


def test_without_a_result_nothing_is_written(folders):
    assert STUB.main(["--no-result"]) == 0
    assert list(folders.rglob("*.json")) == []


def test_the_small_form_has_its_own_defaults_and_never_touches_a_committed_result(folders):
    assert STUB.main(["--quick"]) == 1, "three arms in one round, and a limit of two"
    assert [file.relative_to(folders).as_posix() for file in folders.rglob("*.json")] == ["quick/stub.json"]
    assert json.loads((folders / "quick" / "stub.json").read_text())["limit"] == 2
    assert STUB.main(["--quick", "--limit", "3"]) == 0, "what is given counts"


def test_what_a_run_had_before_it_failed_is_kept(folders):
    def fails(run: Run) -> dict:
        for number, order in run.rounds(["a"], 2):
            if number:
                raise RuntimeError("the server is gone")
            run.keep({"played": list(order)})
        return {}

    broken = Experiment(name="broken", about=None, measure=fails, show=lambda console, result: None)
    with pytest.raises(RuntimeError, match="gone"):
        broken.main([])
    assert json.loads((folders / "results" / "broken.json").read_text())["played"] == ["a"]


def test_whoever_was_first_is_last_next_time():
    orders = [turned("abc", by) for by in range(6)]
    assert orders[:3] == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")]
    assert Counter(order[0] for order in orders) == {"a": 2, "b": 2, "c": 2}
    assert turned([], 3) == ()


def test_a_command_is_as_it_would_be_typed_in_the_checkout():
    words = [
        str(ROOT / "benchmarks" / "speed" / "modes.py"),
        "--model",
        str(ROOT / "model" / "bundled"),
        "--rounds",
        "2",
    ]
    assert command_line(words) == "python -m benchmarks.speed.modes --model model/bundled --rounds 2"
    words = [str(ROOT / "benchmarks" / "fleet" / "__main__.py"), "kills"]
    assert command_line(words) == "python -m benchmarks.fleet kills"


def test_paths_in_a_result_are_those_of_the_checkout(tmp_path):
    write_result(tmp_path / "new" / "r.json", {"settings": {"model.source": str(ROOT / "model" / "bundled")}})
    assert json.loads((tmp_path / "new" / "r.json").read_text())["settings"] == {"model.source": "model/bundled"}


def test_changed_sources_give_no_result(folders, monkeypatch):
    monkeypatch.setattr(experiment, "commit", lambda: "abc-dirty")
    assert STUB.main([]) == 2
    assert not (folders / "results" / "stub.json").exists()
    assert STUB.main(["--no-result"]) == 0
    assert STUB.main(["--quick", "--limit", "9"]) == 0
