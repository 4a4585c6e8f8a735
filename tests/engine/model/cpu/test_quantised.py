"""Tests that modules with packed weights compute what unpacked ones do, and every row in the same way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.engine.model.cpu import quantised as modules
from reprise.engine.model.cpu.quantised import QuantisedEmbedding, QuantisedGate, QuantisedLinear, QuantisedTogether
from reprise.kernels.cpu.available import decode_kernels
from reprise.kernels.packed import PackedWeight, pack, unpack
from tests.kernels.packed_weights import ALL_FORMS, FORMS, Form, random_codes

pytestmark = pytest.mark.skipif(decode_kernels() is None, reason="no numba or no AVX2 here")


def packed(form: Form, outputs: int, inputs: int, seed: int = 0) -> PackedWeight:
    return pack(random_codes(form, outputs, inputs, seed))


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).bfloat16()


def assert_near(got: Tensor, want: Tensor) -> None:
    """Half a unit in the last of 8 bits, and what fp32 sums are off by."""
    assert ((got.float() - want).abs() <= want.abs() * 2**-8 + want.abs().max() * 1e-5).all()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (70, 160), (5, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_multiplies_by_its_unpacked_weight(form: Form, outputs: int, inputs: int, has_bias: bool) -> None:
    weight = packed(form, outputs, inputs)
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    layer = QuantisedLinear(weight, bias)
    assert layer.is_right()
    for count in (1, 2, 5, 8, 13, 17, 40):
        x, residual = rows(count, inputs), rows(count, outputs)
        want = F.linear(x.double(), unpack(weight, torch.float64), None if bias is None else bias.double())
        assert_near(layer(x), want.float())
        assert_near(layer(x, residual), (want + residual.double()).float())


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_computes_in_fp32_without_unpacking(
    monkeypatch: pytest.MonkeyPatch, form: Form, has_bias: bool
) -> None:
    weight = packed(form, 70, 160)
    bias = torch.randn(70) if has_bias else None
    layer, numbers = QuantisedLinear(weight, bias), unpack(weight, torch.float64)
    monkeypatch.setattr(modules, "unpack", None)
    for count in (1, 3, 21):
        x, residual = rows(count, 160).float() / 3, rows(count, 70).float()
        want = F.linear(x.double(), numbers, None if bias is None else bias.double())
        assert layer(x).dtype == torch.float32
        assert (layer(x) - want).norm() <= 1e-6 * want.norm()
        assert (layer(x, residual) - (want + residual)).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_row_has_the_same_bits_however_many_there_are(form: Form) -> None:
    layer = QuantisedLinear(packed(form, 96, 128), None)
    x = rows(60, 128)
    whole = layer(x)
    for first, count in ((0, 1), (3, 2), (5, 4), (9, 8), (10, 17), (20, 40)):
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


@pytest.mark.long
def test_without_dot_products_of_pairs_it_is_as_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "dots_of_pairs", lambda: False)
    for form in ALL_FORMS:
        weight = packed(form, 70, 160)
        layer = QuantisedLinear(weight, None)
        for count in (1, 3, 21):
            x = rows(count, 160)
            assert_near(layer(x), F.linear(x.double(), unpack(weight, torch.float64)).float())


def test_layers_of_the_same_inputs_are_computed_together() -> None:
    layers = [QuantisedLinear(packed(form, 64, 96, seed), None) for seed, form in enumerate(ALL_FORMS)]
    x = rows(7, 96)
    assert torch.equal(QuantisedTogether(layers)(x), torch.cat([layer(x) for layer in layers], -1))


def test_layers_that_end_within_a_block_are_computed_one_by_one() -> None:
    together = QuantisedTogether([QuantisedLinear(packed(FORMS[0], 70, 64, seed), None) for seed in (0, 1)])
    assert together.few is None
    assert together(rows(3, 64)).shape == (3, 140)


@pytest.mark.parametrize("count", [1, 9, 33])
def test_a_gate_is_rounded_once(count: int) -> None:
    gate, up = (packed(form, 70, 64, seed) for seed, form in enumerate(FORMS[:2]))
    x = rows(count, 64)
    wide = [F.linear(x.double(), unpack(weight, torch.float64)) for weight in (gate, up)]
    made = QuantisedGate(QuantisedLinear(gate, None), QuantisedLinear(up, None))(x)
    assert_near(made, (F.silu(wide[0]) * wide[1]).float())


@pytest.mark.parametrize("form", ALL_FORMS)
def test_an_embedding_unpacks_the_rows_it_is_asked_for(form: Form) -> None:
    weight = packed(form, 70, 160)
    ids = torch.tensor([[0, 69, 31], [32, 0, 5]])
    assert torch.equal(QuantisedEmbedding(weight, torch.bfloat16)(ids), unpack(weight, torch.bfloat16)[ids])


@pytest.mark.parametrize("token", [-1, 70])
def test_a_token_that_does_not_exist_is_not_read(token: int) -> None:
    with pytest.raises(IndexError):
        QuantisedEmbedding(packed(FORMS[0], 70, 64), torch.bfloat16)(torch.tensor([token]))


def test_nan_stays_in_its_row() -> None:
    layer = QuantisedLinear(packed(FORMS[1], 64, 64), None)
    x = rows(3, 64)
    clean = layer(x)
    x[1, 7] = float("nan")
    got = layer(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kernel", ["linear", "linear_in_float32"])
def test_kernels_that_are_wrong_are_noticed_and_not_used(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    kernels: Any = decode_kernels()
    linear: Callable[..., None] = getattr(kernels, kernel)

    def off(*args: Any) -> None:
        linear(*args)
        args[-1][:] += 64

    monkeypatch.setattr(kernels, kernel, off)
    layer = QuantisedLinear(packed(FORMS[1], 64, 64), None)
    assert not layer.is_right()
    layer.use_no_kernels()
    for x in (rows(2, 64), rows(2, 64).float()):
        assert torch.equal(layer(x), layer.unpacked(x))


def test_to_check_the_kernels_of_a_large_head_few_of_its_outputs_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    def listening(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        unpacked.append(weight.outputs)
        return unpack(weight, dtype)

    layer = QuantisedLinear(packed(FORMS[0], 10_000, 32), torch.randn(10_000).bfloat16())
    monkeypatch.setattr(modules, "unpack", listening)
    assert layer.is_right()
    assert set(unpacked) == {4096}
