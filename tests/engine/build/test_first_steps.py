"""Tests how large a step may be beside the memory in which loads are decoded."""

from typing import Any

import pytest
import torch

from reprise.engine.build import first_steps
from reprise.engine.model.loading import ModelRefused

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), ModelRefused("no memory for a step")],
)
@pytest.mark.parametrize(("free_bytes", "found"), [(1000, None), (100, 40), (0, None)])
def test_steps_leave_room_for_decoding_if_they_can(
    error: Exception, free_bytes: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside(steps: Any, wanted: int, device: torch.device, kept_bytes: int) -> int:
        if kept_bytes > free_bytes:
            raise error
        return wanted if free_bytes != 100 else 40

    monkeypatch.setattr(first_steps, "_tokens_beside", beside)
    steps: Any = None
    assert first_steps._most_tokens(steps, 160, CUDA, kept_bytes=100) == found


def test_a_device_without_memory_for_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(*_: Any) -> int:
        raise ModelRefused("no memory for a step")

    monkeypatch.setattr(first_steps, "_tokens_beside", beside)
    steps: Any = None
    for kept_bytes in (0, 100):
        with pytest.raises(ModelRefused):
            first_steps._most_tokens(steps, 160, CUDA, kept_bytes=kept_bytes)
