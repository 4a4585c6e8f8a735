"""Tests how long a step takes, on two clocks and on a device, and that steps are launched one after the other."""

import time
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.transfer.device_streams import Fence, HostStream
from reprise.engine.step.batch_step import StepClock
from tests.engine.driver import Driver
from tests.engine.models import random_ids


def test_a_step_goes_on_with_its_callers_clock_and_counts_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: ours)
    ours = 100.0
    clock = StepClock(7.0)
    ours = 100.5  # half a second of scheduling
    clock.begin_computing()
    ours = 102.5
    assert (clock.called, clock.now(), clock.computing_s()) == (7.0, 9.5, 2.0)


class _LateFence:
    """Is done when somebody has waited for it."""

    def __init__(self, device: "_LateDevice") -> None:
        self.is_done = False
        self._device = device

    def wait(self) -> None:
        self.is_done = True
        self._device.log.append("waited")

    def seconds_since(self, earlier: Fence) -> float:
        assert self.is_done
        return 0.25


class _LateDevice(HostStream):
    def __init__(self) -> None:
        self.log: list[str] = []

    def fence(self) -> Any:
        return _LateFence(self)


def test_a_step_is_launched_when_the_one_before_is_over_and_learned_from_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_ids(100, 3)
    expected = Driver(path).ask("a", prompt, max_tokens=3).token_ids
    driver, device = Driver(path, step_tokens=32), _LateDevice()
    compute, rates = driver.compute, driver.cache.rates
    monkeypatch.setattr(compute, "_stream", device)
    forward, learned = compute.runner.forward, []

    def launch(*arguments: Any) -> Any:
        device.log.append("launched")
        return forward(*arguments)

    monkeypatch.setattr(compute.runner, "forward", launch)
    monkeypatch.setattr(rates, "computed", lambda tokens, seconds: learned.append((tokens, seconds)))
    assert driver.ask("a", prompt, max_tokens=3).token_ids == expected
    launches = device.log.count("launched")
    assert launches > 4
    assert device.log == ["launched", *["waited", "launched"] * (launches - 1)]
    assert len(learned) == launches - 1, "the last one may still be under way"
    assert learned[0] == (32, 0.25)
    assert {seconds for _, seconds in learned} == {0.25}
