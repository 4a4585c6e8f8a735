"""Tests requests that alternate step by step, and how their costs are summed up, by hand-worked cases."""

import os
import time
from types import SimpleNamespace

from benchmarks.speed.zero_reuse_steps import (
    STAGES,
    Request,
    Spent,
    serve_all,
    summarize,
    verdicts,
)


def spent(arm: str, round_: int, total_ms: float, cached: int = 0, start: int = 0) -> Spent:
    return Spent(
        "m", arm, start, round_, 1000, cached, dict(zip(STAGES, (0.0, total_ms / 2, total_ms / 2, 0.0), strict=True))
    )


class FakeEngine:
    """A turn of three steps, the first of which gives a token, and one copy after them; every call takes `cost_s`."""

    def __init__(self, cost_s: float, log: list[str]) -> None:
        self.engine = self
        self._cost_s, self._log = cost_s, log
        self._left, self._moving = 0, 0
        self._pipe = os.pipe()
        self._turn = SimpleNamespace(first_s=None, cached=0)

    def _work(self, what: str) -> None:
        self._log.append(what)
        until = time.process_time() + self._cost_s
        while time.process_time() < until:
            pass

    def submit(self, session: str, prompt: list[int], new_tokens: int) -> SimpleNamespace:
        self._work("submit")
        self._left, self._moving = 3, 1
        return self._turn

    def has_work(self) -> bool:
        return self._left > 0

    def step(self) -> None:
        self._work("step")
        self._left -= 1
        self._turn.first_s = 1.0

    def poll(self, now: float) -> None:
        self._work("poll")
        self._moving -= 1

    @property
    def bell(self) -> int:
        return self._pipe[0]

    def is_moving(self) -> bool:
        return self._moving > 0


def test_engines_take_turns_and_each_pays_for_its_own_stages() -> None:
    log: list[str] = []
    arms = {"recompute": FakeEngine(0.002, log), "attentionstore": FakeEngine(0.006, log)}
    found = {one.arm: one for one in serve_all("m", arms, Request([1, 2], 3), start=0, round_=0)}  # type: ignore[arg-type]
    assert log == ["submit"] * 2 + ["step"] * 6 + ["poll"] * 2
    assert found["recompute"].tokens == 4
    for stage, calls in (("submit", 1), ("prompt", 1), ("answer", 2), ("rest", 1)):
        assert found["recompute"].ms[stage] >= 2 * calls
        assert found["attentionstore"].ms[stage] >= 6 * calls
    assert found["recompute"].total_ms < found["attentionstore"].total_ms


def test_long_requests_count_more() -> None:
    rounds = [spent("recompute", 0, 10.0), spent("attentionstore", 0, 12.0)]
    rounds += [spent("recompute", 1, 90.0), spent("attentionstore", 1, 90.0)]
    (theirs, ours) = summarize(rounds)
    assert (ours["ratio"], ours["ratio_p50"], ours["requests"]) == (1.02, 1.0, 2)
    assert (theirs["ratio"], theirs["ratio_low"], theirs["ratio_high"]) == (1.0, 1.0, 1.0)
    assert (ours["prompt_ms"], ours["rest_ms"]) == (25.5, 0.0)
    assert all(verdicts([theirs, ours]).values())


def test_starts_are_told_apart() -> None:
    both = [
        spent(arm, 0, total_ms, start=start)
        for start, ours in enumerate((10.0, 10.6))
        for arm, total_ms in (("recompute", 10.0), ("attentionstore", ours))
    ]
    (_, ours) = summarize(both)
    assert (ours["requests"], ours["ratio"], ours["ratio_by_start"]) == (2, 1.03, [1.0, 1.06])
    assert (ours["ratio_low"], ours["ratio_high"]) == (1.0, 1.06)
    assert all(verdicts([ours]).values())
