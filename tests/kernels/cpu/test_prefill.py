"""Tests the compiled operations on many rows against torch, and that neither threads nor other rows change a bit."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.torch_cpu import _merge
from kernels.cpu import available
from kernels.cpu.available import prefill_kernels, use_torch_threads
from kernels.views import as_bits, as_stream

kernels: Any = prefill_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX-512 here")

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    use_torch_threads()
    kernels.norm(as_bits(x), weight.numpy(), eps, as_bits(out))
    return out


@pytest.mark.parametrize("width", [1, 15, 64, 768, 1001])
def test_rms_norm_is_rounded_once(width: int) -> None:
    x, weight = torch.randn(37, width).bfloat16() * 3, torch.randn(width)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    # Half a unit in the last of 8 bits, and what fp32 is off by.
    assert ((norm(x, weight, 1e-5).double() - exact).abs() <= exact.abs() * (2**-8 + 1e-5)).all()


def test_rms_norm_of_nothing_and_of_what_is_not_a_number() -> None:
    x = torch.ones(3, 64).bfloat16()
    x[0] = 0
    x[1, 5] = float("nan")
    got = norm(x, torch.ones(64), 1e-5)
    assert (got[0] == 0).all()
    assert got[1].isnan().all()
    assert (got[2] == 1).all()


def test_neither_threads_nor_company_change_a_bit_of_a_norm() -> None:
    x, weight = torch.randn(101, 768).bfloat16(), torch.randn(768)
    torch.set_num_threads(1)
    alone = torch.cat([norm(row, weight, 1e-6) for row in x.split(1)])
    together = norm(x, weight, 1e-6)
    torch.set_num_threads(2)
    assert torch.equal(together, alone)
    assert torch.equal(norm(x, weight, 1e-6), alone)


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


@pytest.mark.parametrize("missing", ["numba", "kernels.cpu.prefill"])
def test_without_kernels_there_is_no_error(missing: str) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None;"
        "from kernels.cpu.available import prefill_kernels; assert prefill_kernels() is None; print('ok')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout.strip() == "ok", ran.stderr
