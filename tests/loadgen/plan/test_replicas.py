"""Tests the plan of a fleet."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from reprise.loadgen.fleet.result import summarize
from reprise.loadgen.fleet.simulation import FleetConfig, FleetSimulation
from reprise.loadgen.fleet.workload import SERVER
from reprise.loadgen.plan import plan, replicas
from reprise.loadgen.plan.command import cli
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import fitted

pytestmark = pytest.mark.bench


def planned(rate: float, *, ttft_target_s: float = 2.0, **changed) -> replicas.FleetPlan:
    machine = replace(plan.machine_of("llama-70b"), dram_bytes=128e9, disk_bytes=1e12)
    options = {"ttl_s": 600.0, "think_time": "fixed:5", "distribution": Distribution(), "seed": 0} | changed
    return replicas.plan_replicas(
        machine, rate=rate, ttft_target_s=ttft_target_s, progress=lambda number: None, **options
    )


def test_more_load_needs_more_replicas_and_more_redis(monkeypatch):
    monkeypatch.setattr(replicas, "_DRAWS", 1)
    light, heavy = planned(0.1), planned(1.5)
    assert light.chosen is not None
    assert heavy.chosen is not None
    assert light.chosen.replicas == 1
    assert heavy.chosen.replicas > 2
    assert heavy.chosen.redis_gb_per_s > light.chosen.redis_gb_per_s > 0
    assert heavy.chosen.replicas >= 1.5 / heavy.sessions_per_s  # no replica does more than it can
    assert [row.replicas for row in heavy.rows] == sorted({row.replicas for row in heavy.rows})


@pytest.mark.parametrize("rate", [0.4, 1.5])
def test_its_answer_holds_in_a_fleet_that_is_simulated_whole(rate):
    """Other conversations, and a fleet that begins empty and is looked at when it has long been full."""
    target_s = 2.0
    chosen = planned(rate, ttft_target_s=target_s).chosen
    assert chosen is not None

    def p95_s(number: int) -> float:
        machine = replace(plan.machine_of("llama-70b"), dram_bytes=128e9, disk_bytes=1e12)
        drawn = plan.workload(
            machine, sessions=int(900 * rate), sessions_per_s=rate, think_time="fixed:5",
            distribution=Distribution(), seed=7,
        )  # fmt: skip
        config = FleetConfig(replicas=number, machine=machine, server=SERVER, until_s=900.0, redis_bytes_per_s=1e10)
        whole = [one for one in (fitted(each, machine.window - 1, 0) for each in drawn) if one.turns]
        fleet = FleetSimulation(whole, config)
        fleet.run()
        return summarize([fleet], from_s=450.0, to_s=900.0).ttft_p95_s

    assert p95_s(chosen.replicas) <= 1.2 * target_s
    assert chosen.replicas == 1 or p95_s(chosen.replicas - 1) > 0.8 * target_s


def test_a_target_that_nobody_meets_chooses_nothing(monkeypatch):
    monkeypatch.setattr(replicas, "_ROWS", 2)
    monkeypatch.setattr(replicas, "_DRAWS", 1)
    found = planned(0.1, ttft_target_s=1e-3)
    assert found.chosen is None
    assert len(found.rows) == 2
    assert found.figures()["chosen"] is None


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--replicas", "--sessions-per-s", "0.1", "--think", "fixed:5", "--model", "llama-70b"], 0),
        (["--replicas", "--target", "0.5"], 2),
        (["--replicas", "--trace", "x.jsonl"], 2),
        (["--ttft-target", "1"], 2),
    ],
)
def test_the_command(tmp_path, words, status):
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(cli, [*words, "--out", str(out)])
    assert result.exit_code == status, result.output
    if status == 0:
        assert "Redis GB/s" in result.output
        assert json.loads(out.read_text())["chosen"]["replicas"] == 1
