"""Tests that packed weights come back as they were, whole and row by row."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.kernels.packed import TABLES, Codes, first_outputs, pack, unpack, unpack_codes, unpack_rows
from tests.example_counts import examples
from tests.kernels.packed_weights import ALL_FORMS, Form, random_codes, truth


@settings(deadline=None, max_examples=examples(60))
@given(st.sampled_from(ALL_FORMS), st.integers(1, 100), st.integers(1, 5), st.integers(0, 1 << 30))
def test_a_weight_comes_back_bit_for_bit(form: Form, outputs: int, groups: int, seed: int) -> None:
    given_codes = random_codes(form, outputs, 32 * groups, seed)
    packed, want = pack(given_codes), truth(given_codes)
    assert torch.equal(unpack(packed, torch.float32), want)
    rows = torch.randint(0, outputs, (7,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack_rows(packed, rows, torch.float32), want[rows])
    assert torch.equal(unpack_codes(packed), given_codes.codes)
    some = 1 + seed % (2 * outputs)
    assert torch.equal(unpack(first_outputs(packed, some), torch.float32), want[:some])


def test_four_bits_take_a_quarter_of_bf16_and_what_scales_take() -> None:
    packed = pack(random_codes(Form(4, 32, True), 64, 256, 0))
    assert packed.size_bytes == 64 * 256 // 2 + 2 * 2 * 64 * 256 // 32


@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_numbers_of_codes_are_those_that_they_are_laid_out_with(form: Form) -> None:
    codes = random_codes(form, 40, 96, 0)
    codes = replace(codes, scales=codes.scales.half().float())
    assert torch.equal(codes.numbers(), unpack(pack(codes), torch.float32))


def test_a_table_of_four_bits_has_the_numbers_of_fp4() -> None:
    """Compute them from a sign, two bits of exponent with a bias of 1 and one of mantissa; exponent 0 has no hidden
    bit."""
    for code, number in enumerate(TABLES["e2m1"]):
        sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
        assert number == sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def test_scales_beyond_fp16_are_refused() -> None:
    codes = Codes(torch.zeros(32, 32, dtype=torch.int8), torch.full((32, 1), 1e6), None, 8)
    with pytest.raises(ValueError, match="65504"):
        pack(codes)
