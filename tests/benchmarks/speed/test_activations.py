"""Tests what the benchmark of activations holds."""

import pytest

from benchmarks.speed import activations


def arms(**changes: float) -> dict[str, dict[str, float]]:
    """A recompute of 300 ms, activations made of in 50, of half the bytes."""
    turn_ms = {"hbm": 20.0, "recompute": 320.0, "dram raw": 25.0, "dram activation": 70.0, "disk raw": 200.0}
    turn_ms["disk activation"] = 130.0
    found = {
        name: {"turn_ms": turn_ms[name], "reused": 0.98, "loaded_mb": 20.0, "bytes": 1.0} for name in activations.ARMS
    }
    for name in ("dram activation", "disk activation"):
        found[name] |= {"loaded_mb": 10.0, "bytes": 0.5}
    found["hbm"]["reused"] = found["recompute"]["reused"] = 0.0
    found["dram activation"] |= changes
    return found


def test_its_share_is_what_a_load_adds_to_a_turn() -> None:
    assert activations.share(arms()) == pytest.approx(50 / 300)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, [True, True, True]),
        ({"turn_ms": 97.0}, [False, True, True]),  # 77 / 300
        ({"loaded_mb": 15.0}, [True, False, True]),
        ({"bytes": 1.0}, [True, False, True]),
        ({"reused": 0.5}, [True, True, False]),
    ],
)
def test_each_line_can_fail(changes: dict[str, float], held: list[bool]) -> None:
    assert list(activations.verdicts(arms(**changes)).values()) == held
