"""Tests the codecs that are there for comparison."""

import pytest
import torch

from benchmarks.texts.quantised import Fp8Codec, KiviCodec

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
