"""Tests that the codes of GGUF's formats stand for the numbers that the format's own library reads."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from reprise.engine.gguf.blocks import codes_of, is_kept
from reprise.kernels.packed import pack, unpack
from tests.engine.gguf.gguf_files import stored

KEPT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SIMPLE = 5  # formats whose scales are kept as they are


@pytest.mark.parametrize("kind", KEPT)
def test_kept_codes_stand_for_the_same_numbers(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    weight = np.random.default_rng(0).standard_normal((48, 512), np.float32)
    raw = stored(weight, number)
    want = torch.from_numpy(gguf.quants.dequantize(raw, number))
    assert is_kept(int(number))
    got = unpack(pack(codes_of(int(number), torch.from_numpy(raw))), torch.float32)
    if kind in KEPT[:SIMPLE]:
        assert torch.equal(got, want)
    else:  # products of scales are rounded to fp16
        assert (got - want).abs().max() <= want.abs().max() * 2**-10


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q2_K", "Q3_K", "IQ4_NL"])
def test_other_formats_are_not_kept(kind: str) -> None:
    assert not is_kept(int(GGMLQuantizationType[kind]))


def test_scales_that_are_not_finite_are_refused() -> None:
    raw = torch.zeros(1, 34, dtype=torch.uint8)
    raw[0, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(ValueError, match="not finite"):
        codes_of(int(GGMLQuantizationType.Q8_0), raw)
