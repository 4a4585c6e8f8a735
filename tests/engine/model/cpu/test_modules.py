"""Tests each faster module against the torch modules it replaces."""

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from reprise.engine.model.cpu.modules import (
    GatedMlp,
    PackedLinear,
    PlainLinear,
    RmsNorm,
    packing_works,
)
from reprise.engine.model.known_parts import SharedPart, SharedProduct
from reprise.kernels.cpu.available import decode_kernels

packed = pytest.mark.skipif(not packing_works(), reason="no packed bf16 products on this machine")


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        torch.manual_seed(0)
        yield


def error(got: Tensor, want: Tensor) -> float:
    """Relative RMS."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    return ((got.double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt()).item()


@packed
@pytest.mark.parametrize("rows", [(1, 1), (1, 3), (1, 16), (1, 200), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(rows: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(72, 56, bias=bias).bfloat16()
    x = torch.randn(*rows, 72).bfloat16()
    assert error(PackedLinear(linear.weight, linear.bias)(x), linear(x)) < 0.004  # half a bit of bf16


@packed
def test_packed_linear_of_no_rows() -> None:
    """A step that nobody wants logits of."""
    assert PackedLinear(torch.ones(5, 4).bfloat16(), None)(torch.ones(1, 0, 4).bfloat16()).shape == (1, 0, 5)


@packed
@pytest.mark.parametrize("rows", [1, 7, 150])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp(rows: int, bias: bool) -> None:
    gate, up, down = (nn.Linear(*size, bias=bias) for size in ((64, 96), (64, 96), (96, 64)))
    x = torch.randn(1, rows, 64)
    exact = down(F.silu(gate(x)) * up(x))
    for linear in (gate, up, down):
        linear.bfloat16()
    x = x.bfloat16()
    theirs = down(F.silu(gate(x)) * up(x))
    ours = GatedMlp(gate, up, down)(x)
    assert error(ours.float(), exact) <= 1.5 * error(theirs.float(), exact)  # few numbers, so no closer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, size: float) -> None:
    norm = LlamaRMSNorm(64, eps=1e-5)
    norm.weight.copy_(torch.randn(64))
    x = torch.randn(2, 9, 64) * size
    exact = norm.double()(x.double()).float()
    theirs, x = norm.to(dtype), x.to(dtype)
    ours = RmsNorm(theirs.weight, 1e-5)
    assert error(ours(x).float(), exact) <= 1.05 * error(theirs(x).float(), exact) + 1e-7
    assert ours(x).dtype == dtype


def test_rms_norm_of_heads_that_lie_among_others() -> None:
    norm, x = RmsNorm(torch.randn(64).bfloat16(), 1e-5), torch.randn(7, 6, 64).bfloat16()
    assert torch.equal(norm(x[:, 1:4]), norm(x)[:, 1:4])
    assert norm(x[:0]).shape == (0, 6, 64)


@pytest.mark.skipif(decode_kernels() is None, reason="no numba or no AVX2 here")
def test_a_compiled_norm_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(64).bfloat16(), torch.randn(9, 64).bfloat16()
    want = RmsNorm(weight, 1e-5)(x)
    monkeypatch.setattr(decode_kernels(), "norm", lambda x, weight, eps, out: out.fill(0))
    assert error(RmsNorm(weight, 1e-5)(x), want) < 0.002


def shared(sizes: tuple[int, ...]) -> tuple[list[nn.Linear], list[SharedPart]]:
    linears = [nn.Linear(16, size) for size in sizes]
    joint = PlainLinear(torch.cat([m.weight for m in linears]), torch.cat([m.bias for m in linears]))
    product = SharedProduct(joint, list(sizes))
    return linears, [SharedPart(product, index) for index in range(len(sizes))]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_shared_parts_in_any_order(order: tuple[int, ...]) -> None:
    linears, parts = shared((8, 4, 6))
    for _ in range(3):
        x = torch.randn(1, 5, 16)
        for index in order:
            assert error(parts[index](x), linears[index](x)) < 1e-6


def test_shared_parts_of_different_inputs() -> None:
    """Cross-attention: the query's input is not that of key and value."""
    linears, parts = shared((8, 4, 6))
    for _ in range(2):
        x, y = torch.randn(1, 5, 16), torch.randn(1, 9, 16)
        assert error(parts[0](x), linears[0](x)) < 1e-6
        for index in (1, 2):
            assert error(parts[index](y), linears[index](y)) < 1e-6


def test_a_part_can_be_asked_for_twice() -> None:
    linears, parts = shared((8, 4))
    x = torch.randn(1, 5, 16)
    for index in (0, 0, 1, 1, 0):
        assert error(parts[index](x), linears[index](x)) < 1e-6


def test_parts_left_over_from_a_failed_step_are_not_served() -> None:
    linears, parts = shared((8, 4))
    parts[0](torch.randn(1, 5, 16))  # the step fails before the other part is taken
    x = torch.randn(1, 5, 16)
    for index in (1, 0):
        assert error(parts[index](x), linears[index](x)) < 1e-6


def test_one_product_serves_all_parts_and_nothing_is_kept() -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x.shape)
            return x.repeat(1, 1, 2)

    product = SharedProduct(Counted(), [4, 4])
    x = torch.randn(1, 3, 4)
    assert torch.equal(SharedPart(product, 1)(x), x)
    assert torch.equal(SharedPart(product, 0)(x), x)
    assert calls == [(1, 3, 4)]
    assert product._input is None
    assert product._parts == [None, None]
