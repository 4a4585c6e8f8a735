"""Tests the codecs that are there for comparison."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fidelity.quantised import Fp8Codec, KiviCodec
from tests.example_counts import examples

SHAPES = [((3, 64), (3, 64)), ((2, 24), (2, 32))]
CODECS = [Fp8Codec(SHAPES), KiviCodec(SHAPES, bits=4, v_group=32), KiviCodec(SHAPES, bits=2, v_group=32)]


def there_and_back(codec, raw, layer=0):
    segments = torch.zeros(len(raw), codec.segment_bytes[layer], dtype=torch.uint8)
    done, back = codec.encode(layer, raw, segments), torch.empty_like(raw)
    codec.decode(layer, segments, back)
    return done, back


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("codec", "error", "bits"), list(zip(CODECS, [0.03, 0.1, 0.5], [8, 5.1, 3.1], strict=True)))
def test_what_comes_back_is_near_in_so_many_bits(codec, error, bits, layer):
    (k_heads, k_dim), (v_heads, v_dim) = SHAPES[layer]
    numbers = 32 * (k_heads * k_dim + v_heads * v_dim)
    raw = torch.randn(4, numbers, generator=torch.Generator().manual_seed(0)).bfloat16()
    done, back = there_and_back(codec, raw, layer)
    assert done == [True] * 4
    assert (raw - back).float().norm() < error * raw.float().norm()
    assert codec.segment_bytes[layer] * 8 <= bits * numbers


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_is_not_finite_is_refused(codec):
    raw = torch.zeros(2, 32 * 384, dtype=torch.bfloat16)
    raw[1, 7] = torch.nan
    done, back = there_and_back(codec, raw)
    assert done == [True, False]
    assert (back[0] == 0).all()


@pytest.mark.parametrize("place", [7, 32 * 192 + 7], ids=["key", "value"])
def test_groups_beyond_fp16_are_refused(place):
    raw = torch.zeros(2, 32 * 384, dtype=torch.bfloat16)
    raw[1, place] = -1e6
    assert there_and_back(CODECS[1], raw)[0] == [True, False]


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(1e-3, 300), st.integers(0, 1000))
def test_whole_numbers_are_within_half_a_step(scale, seed):
    raw = torch.randn(1, 32 * 384, generator=torch.Generator().manual_seed(seed)) * scale
    _, back = there_and_back(CODECS[1], raw)
    k, k_back = (x[:, : 32 * 192].view(32, 192) for x in (raw, back))
    step = (k.amax(0) - k.amin(0)) / 15
    assert ((k - k_back).abs() <= 0.55 * step + 2e-3 * k.abs().amax(0)).all()


def test_sizes_that_do_not_go_are_refused():
    with pytest.raises(ValueError, match="3 bits"):
        KiviCodec(SHAPES, bits=3, v_group=32)
    with pytest.raises(ValueError, match="groups of 48"):
        KiviCodec(SHAPES, bits=4, v_group=48)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_rows_are_the_same_on_a_device(codec, device):
    there = codec.on(torch.device(device))
    assert (there.device.type, codec.device.type) == (device, "cpu")
    raw = torch.randn(4, 32 * 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    segments, back = torch.zeros(4, codec.segment_bytes[0], dtype=torch.uint8), raw.to(device)
    codec.encode(0, raw, segments)
    there.decode(0, segments, back)
    assert torch.equal(back.cpu(), there_and_back(codec, raw)[1])
