"""Tests `reprise simulate` without a trace."""

import json

import pytest
from typer.testing import CliRunner

from reprise.app.cli.program import cli
from reprise.loadgen.sim import arm_tables

# Of DRAM so much that look-ahead is not held up by the disk, which reads KV as slowly as two GPUs compute it.
MACHINE = arm_tables.preset("llama-13b", "saturated", dram_bytes=20e9, disk_bytes=40e9)
SMALL = {
    "machine": MACHINE, "load": "saturated", "sessions": 60, "sessions_per_s": None, "truncation": "decoupled",
    "warmup_turns": 20, "seed": 1, "progress": lambda arm: None,
}  # fmt: skip


def test_arms_stand_between_recompute_and_unbounded():
    result = arm_tables.simulate(policies=["lru", "default", "belady", "unbounded"], **SMALL)
    arms = {arm["arm"]: arm for arm in result["arms"]}
    assert arms["recompute"]["token_hit_rate"] == 0
    assert 0 < arms["lru"]["hit_rate_returning"] < arms["belady"]["hit_rate_returning"]
    # A window can overflow so far that nothing of the history is left to be found.
    assert arms["belady"]["hit_rate_returning"] <= arms["unbounded"]["hit_rate_returning"]
    assert arms["unbounded"]["hit_rate_returning"] == pytest.approx(1.0, abs=0.01)
    # Nearly all that LRU finds here is on disk, from where it takes as long as to compute it.
    assert arms["unbounded"]["prefill_mean_s"] < arms["default"]["prefill_mean_s"] < arms["recompute"]["prefill_mean_s"]
    assert arms["recompute"]["cost_storage"] == 0 < arms["lru"]["cost_storage"]


def test_the_command_writes_what_it_shows(tmp_path):
    out = tmp_path / "result.json"
    words = ["simulate", "--sessions", "40", "--warmup-turns", "5", "--policies", "lru", "--out", str(out)]
    finished = CliRunner().invoke(cli, [*words, "--dram-gb", "5"])
    assert finished.exit_code == 0, finished.output
    assert "…" not in finished.output.split("What is stated")[0], "every digit is shown, however narrow the terminal"
    result = json.loads(out.read_text(encoding="utf-8"))
    assert arm_tables.read_machine(out) == arm_tables.preset("llama-13b", "saturated", dram_bytes=5e9, disk_bytes=10e12)
    over = CliRunner().invoke(cli, [*words, "--machine", str(out)])
    assert (over.exit_code, json.loads(out.read_text("utf-8"))) == (2, result), (
        "the machine it reads is not written over"
    )
    second = tmp_path / "second.json"
    again = CliRunner().invoke(cli, [*words[:-1], str(second), "--machine", str(out)])
    assert again.exit_code == 0, again.output
    without_times = [
        [{**arm, "processor_s": 0} for arm in found["arms"]]
        for found in (result, json.loads(second.read_text("utf-8")))
    ]
    assert without_times[0] == without_times[1]
    assert [arm["arm"] for arm in result["arms"]] == ["recompute", "lru"]
    assert "fitted to LRU and FIFO" in json.dumps(result["assumptions"])


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "gpt-5"],
        ["--load", "heavy"],
        ["--policies", "clock"],
        ["--truncation", "none"],
        ["--server", "http://127.0.0.1:9"],
        ["--machine", "/no/such/file"],
    ],
)
def test_what_is_not_known_is_refused(words):
    assert CliRunner().invoke(cli, ["simulate", *words]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--trace", "x", "--sessions", "9", "--seed", "1"], "--sessions, --seed have no effect with --trace"),
        (["--trace", "x", "--dram-gb", "9"], "--dram-gb has no effect with --trace"),
        (["--capacity-tokens", "1024"], "--capacity-tokens has no effect without --trace"),
        (["--figure", "x.png"], "--figure has no effect without --trace"),
        (["--score-from", "0.5"], "--score-from has no effect without --trace"),
        (["--machine", "x", "--model", "llama-65b"], "--model has no effect with --machine"),
        (["--server", "http://127.0.0.1:9", "--machine", "x"], "--machine has no effect with --server"),
        (["--api-key", "x"], "--api-key has no effect without --server"),
    ],
)
def test_what_would_have_no_effect_is_refused(words, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["simulate", *words], env={"COLUMNS": "200", "OPENAI_API_KEY": "of another tool"})
    assert (result.exit_code, result.stderr.strip()) == (2, f"reprise simulate: {problem}")


@pytest.mark.parametrize(
    "spoilt",
    [{"disk_to_dram": 0}, {"window": "x"}, {"window": 1}, {"max_seqs": 0}, {"dram_to_hbm": -1}, {"dram_bytes": None}],
)
def test_a_machine_that_cannot_run_is_refused(tmp_path, spoilt):
    fields = arm_tables.simulate(policies=[], **SMALL)["machine"]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": fields}))
    assert arm_tables.read_machine(path) == MACHINE
    path.write_text(json.dumps({"machine": fields | spoilt}))
    with pytest.raises(ValueError, match="holds no machine"):
        arm_tables.read_machine(path)
