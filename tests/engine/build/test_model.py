"""Tests which attention a model is given: the one whose decode steps can be graphs goes first."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from reprise.engine.build import model as build
from reprise.engine.model.graph_runner import PlanMaker
from reprise.kernels.attention.ragged_batch import AttentionUnsupported


@pytest.fixture
def with_flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a CUDA device, Triton, and flash-attn installed."""
    stub = ModuleType("flash_attn")
    vars(stub)["flash_attn_varlen_func"] = None
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    sys.modules.pop("reprise.kernels.attention.flash_attn", None)
    pytest.importorskip("triton")
    monkeypatch.setattr("reprise.kernels.attention.triton_paged.prompt_attention", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    sys.modules.pop("reprise.kernels.attention.flash_attn", None)  # it holds the stub


def _agree(module: Any, backend: Any, page_size: int) -> Any:
    return "found"


def _refuse_triton(module: Any, backend: Any, page_size: int) -> Any:
    if backend.name == "triton":
        raise AttentionUnsupported("a kind of layer")
    return "found"


@pytest.mark.usefixtures("with_flash_attn")
def test_installing_flash_attn_leaves_decode_steps_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "probe", _agree)
    backend, page_size, _ = build.find_attention(torch.nn.Identity(), torch.device("cuda"))
    assert isinstance(backend, PlanMaker)
    assert page_size < 256, "larger pages are copied in larger parts where a conversation is cut"


@pytest.mark.usefixtures("with_flash_attn")
def test_flash_attn_takes_the_models_that_triton_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "probe", _refuse_triton)
    backend, _, _ = build.find_attention(torch.nn.Identity(), torch.device("cuda"))
    assert backend.name == "flash"


@pytest.mark.long
def test_a_plain_model_in_fp32_does_not_start_the_kernels_for_bf16(tmp_path: Path) -> None:
    """Keep a pool of threads away that slows it down without AVX-512."""
    program = f"""
import torch
torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
from pathlib import Path
from reprise.kernels.cpu.available import decode_kernels
from tests.engine.driver import Driver
from tests.engine.saved_models import save_model
path = save_model("llama", Path({str(tmp_path / "model")!r})).path
Driver(path, dtype="float32", disk_dir={str(tmp_path / "state")!r}).ask("a", [5, 6, 7], max_tokens=3)
assert not decode_kernels.cache_info().currsize
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
