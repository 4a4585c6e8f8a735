"""Tests products with a fixed order of sums: they are right, and a row's bits depend neither on other rows nor on the
number of threads."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.cpu import available
from reprise.kernels.cpu.available import product_kernels, tiles_of_pairs, use_torch_threads
from reprise.kernels.views import as_bits

kernels: Any = product_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX512_BF16 here")

NOTHING = np.empty((0, 0), np.uint16)
KINDS = [False, True] if kernels is not None and tiles_of_pairs() else [False]  # by tiles
COUNTS = (1, 2, 8, 9, 16, 17, 31, 41, 64, 300)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def packed(weight: Tensor, bias: Tensor | None, lanes: int, by_tiles: bool) -> Any:
    """A product with the weight in blocks of so many vectors."""
    outputs, inputs = weight.shape
    blocks, pairs = -(-outputs // (16 * lanes)), -(-inputs // 32) * 16
    padded = F.pad(weight, (0, 2 * pairs - inputs, 0, blocks * lanes * 16 - outputs))
    words = padded.view(blocks, lanes * 16, pairs, 2).transpose(1, 2).contiguous().view(torch.int32).view(-1)
    biases = np.empty(0, np.float32) if bias is None else bias.float().numpy()
    kind = (0,) if by_tiles else ()
    return kernels.ExactProduct(words.numpy().view(np.uint32), biases, inputs, outputs, (0,) * lanes, kind)


def linear(x: Tensor, product: Any, residual: Tensor | None = None, threads: int = 2) -> Tensor:
    torch.set_num_threads(threads)
    use_torch_threads()
    out = torch.full((len(x), product.outputs), 7.0).bfloat16()
    kernels.linear(as_bits(x), product, NOTHING if residual is None else as_bits(residual), as_bits(out))
    return out


def gated(x: Tensor, gate: Any, up: Any) -> Tensor:
    out = torch.full((len(x), gate.outputs), 7.0).bfloat16()
    kernels.gated(as_bits(x), gate, up, as_bits(out))
    return out


# Not of whole tiles, blocks of each width, and more weights than one run of blocks.
SHAPES = [(56, 72, 1), (64, 96, 2), (100, 64, 3), (128, 200, 4), (1024, 768, 2)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("by_tiles", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "lanes"), SHAPES)
def test_a_row_is_the_same_in_any_crowd(outputs: int, inputs: int, lanes: int, by_tiles: bool) -> None:
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    x, residual = torch.randn(300, inputs).bfloat16(), torch.randn(300, outputs).bfloat16()
    wide = x.float() @ weight.float().T
    for added in itertools.product((None, bias), (None, residual)):
        product = packed(weight, added[0], lanes, by_tiles)
        together = linear(x, product, added[1])
        want = wide + sum(y.float() for y in added if y is not None)
        torch.testing.assert_close(together.float(), want, rtol=2**-8, atol=2**-6)
        for count in COUNTS:
            rows = slice(300 - count, 300)
            threads = 1 + count % 2
            got = linear(x[rows], product, None if added[1] is None else residual[rows], threads)
            assert torch.equal(got, together[rows]), (count, added)


@pytest.mark.parametrize("by_tiles", KINDS)
@pytest.mark.parametrize("lanes", [2, 4])
def test_a_gated_row_too(lanes: int, by_tiles: bool) -> None:
    weights = torch.randn(2, 128, 96).bfloat16()
    gate, up = (packed(weight, None, lanes, by_tiles) for weight in weights)
    x = torch.randn(300, 96).bfloat16()
    x[7] *= 1000  # where exp(-gate) overflows
    together = gated(x, gate, up)
    one, other = (x.double() @ weight.double().T for weight in weights)
    torch.testing.assert_close(together.double(), F.silu(one) * other, rtol=2**-7, atol=2**-4)
    for count in COUNTS:
        assert torch.equal(gated(x[:count], gate, up), together[:count])


@pytest.mark.parametrize("by_tiles", KINDS)
def test_what_is_no_number_stays_in_its_row(by_tiles: bool) -> None:
    product = packed(torch.randn(64, 64).bfloat16(), None, 2, by_tiles)
    x = torch.randn(40, 64).bfloat16()
    expected = linear(x, product)
    x[11, 3], x[38, 0] = float("nan"), float("inf")
    got = linear(x, product)
    assert got[11].isnan().all()
    assert not got[38].isfinite().any()
    others = [row for row in range(40) if row not in (11, 38)]
    assert torch.equal(got[others], expected[others])


def test_kernels_that_fail_their_test_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "linear", lambda x, product, residual, out: out.fill(0))
    assert available.product_kernels.__wrapped__() is None


def test_they_are_for_processors_with_dot_products_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert available.product_kernels.__wrapped__() is None
