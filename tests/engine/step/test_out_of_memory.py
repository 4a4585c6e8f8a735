"""Tests that a step for which the device has no memory is tried again in smaller ones, and ends nobody's answer."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.engine.model.batch import BatchInput
from tests.engine.driver import Driver
from tests.engine.models import random_ids

NO_MEMORY = [
    torch.OutOfMemoryError("2 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


class SmallDevice:
    """Has memory for so many tokens a step."""

    def __init__(
        self,
        driver: Driver,
        most_tokens: int,
        monkeypatch: pytest.MonkeyPatch,
        error: RuntimeError = NO_MEMORY[0],
    ) -> None:
        self._error = error
        self.sizes: list[int] = []
        self._most_tokens = most_tokens
        self._activations: Callable[[], Any] = lambda: None
        self._inner = driver.compute.runner.forward
        monkeypatch.setattr(driver.compute.runner, "forward", self.forward)

    def forward(self, batch: BatchInput, *arguments: Any) -> torch.Tensor:
        self.sizes.append(batch.token_ids.shape[0])
        assert self._activations() is None, "what the step before has computed takes memory"
        if self.sizes[-1] > self._most_tokens:
            activations = torch.zeros(1)
            self._activations = weakref.ref(activations)
            raise self._error.with_traceback(None)
        return self._inner(batch, *arguments)


@pytest.mark.parametrize(("with_tiers", "error"), [(True, NO_MEMORY[0]), (False, NO_MEMORY[0]), (False, NO_MEMORY[1])])
def test_steps_become_smaller_until_they_fit(
    path: Path, monkeypatch: pytest.MonkeyPatch, with_tiers: bool, error: RuntimeError
) -> None:
    prompts = [random_ids(120, seed) for seed in range(3)]
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    config = {"cache_mode": "attentionstore", "dram_bytes": 1 << 20} if with_tiers else {}
    whole = Driver(path)
    expected = [whole.ask(str(n), prompt, **options).token_ids for n, prompt in enumerate(prompts)]
    driver = Driver(path, **config)
    device = SmallDevice(driver, 40, monkeypatch, error)
    answers = [driver.submit(str(n), prompt, **options) for n, prompt in enumerate(prompts)]
    driver.run()
    assert [answer.token_ids for answer in answers] == expected
    failed = [size for size in device.sizes if size > 40]
    assert len(failed) <= 5
    last = device.sizes.index(failed[-1])
    assert max(device.sizes[last + 1 :]) <= failed[-1] // 2, "for good"
    again = driver.ask("again", random_ids(100, 9), **options)
    assert len(again.token_ids) == 12
    assert device.sizes.count(failed[-1]) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_a_step_that_cannot_be_smaller_fails(path: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    driver = Driver(path, chunked_prefill=chunked)
    SmallDevice(driver, 0, monkeypatch)
    answer = driver.submit("a", random_ids(120, 1))
    with pytest.raises(torch.OutOfMemoryError):
        driver.run(max_steps=8)
    driver._take(driver.engine.fail_all("no memory"))
    assert (answer.finish_reason, answer.token_ids) == ("error", [])
    assert driver.engine.stats().leases == 0
