"""Tests the compiled merge of two attentions against torch. `test_many_rows` of the engine tests the rotation."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.kernels.attention.torch_cpu import _merge
from reprise.kernels.cpu import available
from reprise.kernels.cpu.available import prefill_kernels
from reprise.kernels.views import as_stream

kernels: Any = prefill_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX2 here")

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def parts(kv_heads: int, groups: int, rows: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two attentions [kv_heads, groups, rows, dim] with their log-sum-exps, strided as SDPA leaves them."""
    own = torch.randn(kv_heads, rows, groups, dim).bfloat16().transpose(1, 2)
    old = torch.randn(groups, rows, kv_heads, dim).bfloat16().permute(2, 0, 1, 3)
    own_lse = (torch.randn(kv_heads, rows, groups) * 5).transpose(1, 2)
    old_lse = (torch.randn(groups, rows, kv_heads) * 5).permute(2, 0, 1)
    return own, own_lse, old, old_lse


@pytest.mark.parametrize(("kv_heads", "groups", "rows", "dim"), [(1, 1, 1, 16), (4, 3, 33, 64), (2, 7, 5, 80)])
def test_two_attentions_merge(kv_heads: int, groups: int, rows: int, dim: int) -> None:
    own, own_lse, old, old_lse = parts(kv_heads, groups, rows, dim)
    out = torch.empty(rows, kv_heads, groups, dim, dtype=torch.bfloat16)
    _merge(kernels, own, own_lse, old, old_lse, out)
    weights = torch.stack((own_lse, old_lse)).double().softmax(0)[..., None]
    exact = (weights[0] * own.double() + weights[1] * old.double()).permute(2, 0, 1, 3)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_log_sum_exps_far_apart_overflow_nowhere() -> None:
    own, own_lse, old, old_lse = parts(2, 2, 4, 16)
    out = torch.empty(4, 2, 2, 16, dtype=torch.bfloat16)
    _merge(kernels, own, own_lse + 1000, old, old_lse - 1000, out)
    assert torch.equal(out, own.permute(2, 0, 1, 3))
    _merge(kernels, own, own_lse - 1000, old, old_lse + 1000, out)
    assert torch.equal(out, old.permute(2, 0, 1, 3))


def test_a_stream_holds_every_element_of_a_view() -> None:
    x = torch.arange(120).view(2, 3, 4, 5).float()[:, 1:, :, 2:].permute(2, 0, 1, 3)
    stream = as_stream(x)
    assert stream[0] == x[0, 0, 0, 0]
    at = sum(i * stride for i, stride in zip((3, 1, 0, 2), x.stride(), strict=True))
    assert stream[at] == x[3, 1, 0, 2]
    assert stream[-1] == x[-1, -1, -1, -1]


def test_kernels_that_fail_their_test_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "merge", lambda *_: None)
    assert available.prefill_kernels.__wrapped__() is None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("missing", ["numba", "reprise.kernels.cpu.prefill"])
def test_without_kernels_there_is_no_error(missing: str) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None;"
        "from reprise.kernels.cpu.available import prefill_kernels; assert prefill_kernels() is None; print('ok')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout.strip() == "ok", ran.stderr
