"""Tests how far rounded weights are from the given ones."""

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from reprise.engine.packed.quantise import quantise
from reprise.kernels.packed import pack, unpack


def random(outputs: int = 64, inputs: int = 512) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.02


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_1"), (8, "Q8_0")])
def test_it_is_no_further_off_than_the_formats_of_as_many_bits(bits, kind) -> None:
    weight = random()
    number = GGMLQuantizationType[kind]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), number), number)
    assert error(unpack(pack(quantise(weight, bits)), torch.float32), weight) <= error(torch.from_numpy(theirs), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_are_all_alike_are_kept(bits) -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2, 32:] = 0.5, -2.0
    back = unpack(pack(quantise(weight, bits)), torch.float32)
    assert (back - weight).abs().max() < 2e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_large_weights_are_rounded_in_parts_alike(bits, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantise(random(), bits)
    monkeypatch.setattr("reprise.engine.packed.quantise._NUMBERS_TOGETHER", 512 * 5)
    parts = quantise(random(), bits)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(bits, number: float) -> None:
    """They would become zeros, and their neighbours with them."""
    weight = random()
    weight[3, 40] = number
    with pytest.raises(ValueError, match="not finite"):
        quantise(weight, bits)


def test_numbers_too_large_for_scales_are_refused() -> None:
    """Eight bits have the limit when they are packed."""
    with pytest.raises(ValueError, match="too large"):
        quantise(random() * 1e8, 4)
    with pytest.raises(ValueError, match="beyond 65504"):
        pack(quantise(random() * 1e9, 8))
