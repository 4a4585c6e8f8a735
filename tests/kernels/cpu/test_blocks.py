"""Tests products with one block of a packed weight: on vectors of any length, which run wherever numba does."""

import platform

import numpy as np
import pytest
import torch

from reprise.kernels.packed import BLOCK, pack, unpack
from tests.kernels.packed_weights import ALL_FORMS, Form, random_codes

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.cpu._is_avx2_supported(), reason="numba compiles for x86 here"
)


@pytest.mark.long
@pytest.mark.parametrize("form", [ALL_FORMS[0], *(form for form in ALL_FORMS if form.table)])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_block_is_multiplied_without_dot_products_of_pairs(form: Form, rows: int) -> None:
    from reprise.kernels.cpu import blocks

    weight = pack(random_codes(form, 2 * BLOCK, 96, seed=rows))
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).contiguous()
    out = torch.zeros(rows, 2 * BLOCK)
    kind = blocks.E2M1 if form.table else blocks.PLAIN
    kernel = blocks.packed_kernel(form.bits, kind, form.group, False)
    fields = (kernel.address, weight.codes.data_ptr(), weight.scales.data_ptr(), 0, 0, 96, 2 * BLOCK, BLOCK, 0)
    product = np.array([*fields, form.bits, form.group, kind], np.int64)
    for block in range(2):
        place = (rows, x.data_ptr(), 96 * 4, 0, 0, out.data_ptr() + block * BLOCK * 4, 2 * BLOCK * 4)
        kernel.ctypes(product.ctypes.data, block, *place, 0)
    wanted = x.double() @ unpack(weight, torch.float64).T
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["PLAIN", "WITH_LOWS", "E2M1"])
def test_the_numbers_that_dot_products_look_up_are_those_of_codes(kind: str) -> None:
    """They are exact in bf16, and lie there twice."""
    from reprise.kernels.cpu import blocks
    from reprise.kernels.packed import code_numbers

    constants = [element.constant for element in blocks._code_table(getattr(blocks, kind)).constant]
    bits = torch.tensor(constants, dtype=torch.int32) << 16
    codes = torch.arange(16, dtype=torch.int8).repeat(2)
    wanted = code_numbers(codes, 4, kind == "WITH_LOWS", "e2m1" if kind == "E2M1" else None)
    assert torch.equal(bits.view(torch.float32), wanted)


@pytest.mark.parametrize("form", [form for form in ALL_FORMS if form.bits == 4])
def test_a_row_is_unpacked(form: Form) -> None:
    from reprise.kernels.cpu import blocks
    from reprise.kernels.cpu.multiply import unpack_row

    weight = pack(random_codes(form, 2 * BLOCK, 96, seed=3))
    lows = 0 if weight.lows is None else weight.lows.data_ptr()
    kind = blocks.E2M1 if form.table else blocks.WITH_LOWS if form.has_lows else blocks.PLAIN
    fields = (0, weight.codes.data_ptr(), weight.scales.data_ptr(), lows, 0, 96, 2 * BLOCK, BLOCK, 0)
    product = np.array([*fields, form.bits, form.group, kind], np.int64)
    for row in (0, 37, 63):
        out = np.empty(96, np.uint16)
        unpack_row(product, row, out)
        got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
        assert torch.equal(got, unpack(weight, torch.bfloat16)[row])
