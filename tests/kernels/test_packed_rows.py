"""Tests that packed weights laid out by rows are what they were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.kernels.packed import pack, unpack
from reprise.kernels.packed_rows import by_rows, joined, unpacked
from tests.example_counts import examples
from tests.kernels.packed_weights import ALL_FORMS, Form, random_codes, truth

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=examples(60))
@given(st.sampled_from(ALL_FORMS), st.integers(1, 100), st.integers(1, 5), st.integers(0, 1 << 30))
def test_a_weight_comes_back_bit_for_bit(form: Form, outputs: int, groups: int, seed: int) -> None:
    codes = random_codes(form, outputs, 32 * groups, seed)
    rows = by_rows(pack(codes), CPU)
    assert torch.equal(unpacked(rows, slice(None), torch.float32), truth(codes))
    assert (rows.outputs, rows.inputs, rows.form[:3]) == (outputs, 32 * groups, (form.bits, form.group, form.has_lows))
    some = torch.randint(0, outputs, (7,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpacked(rows, some, torch.float32), truth(codes)[some])


@pytest.mark.parametrize("form", ALL_FORMS)
def test_it_is_rounded_as_the_cpus_layout_is(form: Form) -> None:
    weight = pack(random_codes(form, 40, 96, 0))
    assert torch.equal(unpacked(by_rows(weight, CPU), slice(None), torch.bfloat16), unpack(weight, torch.bfloat16))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_it_takes_no_more_than_codes_and_scales(form: Form) -> None:
    bits, group, has_lows, _ = form
    weight = by_rows(pack(random_codes(form, 64, 256, 0)), CPU)
    assert weight.size_bytes == 64 * 256 * bits // 8 + (1 + has_lows) * 2 * 64 * 256 // group


@pytest.mark.parametrize("form", ALL_FORMS)
def test_joined_weights_have_the_outputs_of_all(form: Form) -> None:
    parts = [by_rows(pack(random_codes(form, outputs, 64, outputs)), CPU) for outputs in (33, 1, 64)]
    whole = joined(parts)
    wanted = torch.cat([unpacked(part, slice(None), torch.bfloat16) for part in parts])
    assert torch.equal(unpacked(whole, slice(None), torch.bfloat16), wanted)
