"""Tests what the comparison of routing policies simulates, and how it judges."""

from typing import Any

import pytest

from benchmarks.scheduling.fleet_routing import AMPLE, EXPERIMENT, cells_of, held, play


def row(policy: str, p95_s: float, **changed: Any) -> dict[str, Any]:
    plain = {"part": "grid", "replicas": 6, "agents": 0.1, "load": 0.7, "redis": AMPLE}
    return plain | {"policy": policy, "ttft_p95_s": p95_s} | changed


def test_guarded_routing_is_held_against_the_others_of_its_cell():
    others = [row("hash", 1.0), row("sticky", 0.6), row("sticky", 0.1, load=0.9)]
    others += [row("hash", 1.0, part="kill", redis=0), row("hash", 0.5, part="kill")]
    good = held([*others, row("guarded", 0.55), row("guarded", 0.15, part="kill")])
    bad = held([*others, row("guarded", 0.62), row("guarded", 0.25, part="kill")])
    assert (list(good.values()), list(bad.values())) == ([True] * 3, [False] * 3)


def test_a_cell_is_played():
    cells = [cell for part in ("grid", "kill") for cell in cells_of(part, EXPERIMENT.parse([]))]
    assert len({tuple(sorted(cell.items())) for cell in cells}) == len(cells)
    found = play(cells[-1] | {"replicas": 2}, 0.5, seconds=60.0, rounds=1)
    assert found["turns"] > 0
    assert found["ttft_p95_s"] >= found["ttft_p50_s"] > 0
    assert sum(found["tokens"].values()) == pytest.approx(1.0, abs=1e-3)
