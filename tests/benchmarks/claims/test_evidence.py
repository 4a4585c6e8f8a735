"""Tests which results are measured again."""

import pytest

from benchmarks.claims import evidence
from benchmarks.claims.evidence import stale, staleness, wait_until_idle
from benchmarks.claims.read import Claim


def claim(result: str, commit: str) -> Claim:
    command = f"python -m benchmarks.{result}"
    return Claim("Speed", "It takes **1** ms", result, (), command, "2026-01-02", "a CPU", commit, (), 0)


def test_a_result_of_changed_sources_or_unknown_commits_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert staleness("0123456789ab-dirty") == "from sources with changes"
    assert staleness("0" * 12) == f"from {'0' * 12}, which is no ancestor"
    monkeypatch.setattr(evidence, "staleness", {"old": "old", "new": ""}.get)
    found = [claim("a", "old"), claim("b", "new"), claim("a", "old")]
    assert stale(found) == {"a": ("python -m benchmarks.a", "old")}
    assert stale(found, ["b"]) == {"b": ("python -m benchmarks.b", "named")}


def test_it_waits_for_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(evidence.time, "sleep", waited.append)
    monkeypatch.setattr(evidence.time, "monotonic", lambda: sum(waited))
    loads = iter([9.0, 9.0, 0.1])
    assert wait_until_idle(lambda: next(loads))
    assert len(waited) == 2
    assert not wait_until_idle(lambda: 9.0)
