"""Tests what the comparison of routing policies simulates, and how it judges."""

from typing import Any

import pytest

from benchmarks.scheduling.fleet_routing import AMPLE, EXPERIMENT, PARTS, cells_of, held, play


def row(policy: str, p95_s: float, **changed: Any) -> dict[str, Any]:
    plain = {"part": "grid", "replicas": 6, "agents": 0.1, "load": 0.7, "redis": AMPLE}
    return plain | {"policy": policy, "ttft_p95_s": p95_s} | changed


def test_guarded_routing_is_held_against_the_others_of_its_cell():
    rows = [row("hash", 1.0), row("sticky", 0.6), row("guarded", 0.55), row("sticky", 0.1, load=0.9)]
    assert list(held(rows).values()) == [True, True]
    rows[2] = row("guarded", 0.62)
    assert list(held(rows).values()) == [False, False]


def test_after_a_kill_it_is_held_against_hashing_without_redis():
    rows = [row("hash", 1.0, part="kill", redis=0), row("guarded", 0.15, part="kill")]
    assert list(held(rows).values()) == [True]
    assert list(held([*rows[:1], row("guarded", 0.25, part="kill")]).values()) == [False]


@pytest.mark.parametrize("part", PARTS)
def test_every_guarded_cell_has_what_it_is_held_against(part):
    cells = list(cells_of(part, EXPERIMENT.parse([])))
    assert len({tuple(sorted(cell.items())) for cell in cells}) == len(cells)
    rows = [cell | {"ttft_p95_s": 1.0} for cell in cells]
    guarded = sum(cell["policy"] == "guarded" and cell["part"] not in ("late", "large") for cell in cells)
    assert len(held(rows)) >= guarded - (part == "kill") * 2  # without Redis, nothing is judged after a kill


def test_a_cell_is_played():
    cell = next(cells_of("kill", EXPERIMENT.parse([]))) | {"replicas": 2}
    found = play(cell, {0.1: 0.5}, seconds=60.0, rounds=1)
    assert found["turns"] > 0
    assert found["ttft_p95_s"] >= found["ttft_p50_s"] > 0
    assert sum(found["tokens"].values()) == pytest.approx(1.0, abs=1e-3)
