"""Tests rows of a byte a number: what packing keeps of them, and that compiled code makes the same bytes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reprise.kernels.cpu.available import load_kernels
from reprise.kernels.int8_pages.pages import LEVELS, Int8Pages
from reprise.kernels.views import as_bits
from tests.example_counts import examples

ODD = [0.0, -0.0, 1e-40, -3e-39, 1.2e-38, 5e-37, 1e38, 3.3e38, math.inf, -math.inf, math.nan]


@st.composite
def heads(draw: st.DrawFn) -> Tensor:
    """Heads of one width in bf16, from tiny to huge, some with numbers that are rare."""
    count, dim = draw(st.integers(1, 6)), 2 * draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = torch.tensor(draw(st.lists(st.integers(-130, 126), min_size=count, max_size=count)))
    rows = torch.randn(count, dim, generator=generator, dtype=torch.float64) * 2.0 ** sizes[:, None]
    for value in draw(st.lists(st.sampled_from(ODD), max_size=3)):
        rows[draw(st.integers(0, count - 1)), draw(st.integers(0, dim - 1))] = value
    return rows.float().bfloat16()


@settings(deadline=None)
@given(heads())
def test_a_number_is_off_by_half_a_level_at_most(rows: Tensor) -> None:
    got = Int8Pages.to_numbers(Int8Pages.to_rows(rows), torch.float32)
    for row, found in zip(rows.float(), got, strict=True):
        if not row.isfinite().all():
            assert found.isnan().all()
            continue
        level = row.abs().max() / LEVELS
        # The scale is rounded to bf16, by 2^-9 of itself, which moves the largest number by a quarter of a level; what
        # has no scale above 2^-126 becomes 0.
        assert ((row - found).abs() <= torch.maximum(0.76 * level, torch.tensor(2.0**-119))).all()


def test_a_heads_largest_number_fits() -> None:
    """The bound holds whatever bf16 makes of the scale."""
    every = torch.arange(0x0080, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    packed = Int8Pages.to_rows(torch.stack((every, -every), 1))
    assert packed[:, 0].min() >= 0
    assert torch.equal(packed[:, 0], -packed[:, 1])
    assert packed[-1, 0] >= 126


def test_rows_of_other_types_are_rounded_to_bf16_first() -> None:
    rows = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Int8Pages.to_rows(rows), Int8Pages.to_rows(rows.bfloat16()))


@pytest.mark.parametrize(("scale", "largest"), [(2.0**-126, LEVELS), (2.0**-127, 0)])
def test_the_least_scale_that_has_an_inverse_is_kept(scale: float, largest: int) -> None:
    rows = Int8Pages.to_rows(torch.tensor([[scale * LEVELS, 0.0]]))
    assert rows[0, 0] == largest
    assert rows[0, 2:].any() == bool(largest)


@pytest.mark.skipif(load_kernels() is None, reason="no numba here")
@settings(deadline=None, max_examples=examples(200))
@given(heads())
def test_compiled_code_makes_the_same_bytes(rows: Tensor) -> None:
    from reprise.kernels.cpu import packed_heads

    compiled: Any = packed_heads
    wanted = Int8Pages.to_rows(rows)
    packed = np.full(wanted.shape, 77, np.int8)
    for row, numbers in enumerate(as_bits(rows)):
        compiled.pack_head(numbers, packed[row].ctypes.data)
    assert packed.tobytes() == wanted.numpy().tobytes()
    assert packed.shape[1] - rows.shape[1] == Int8Pages.beside
