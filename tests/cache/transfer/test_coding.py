"""Tests what is coded of slots: what their checksums no longer vouch for is not."""

import torch

from cache.storage.slab import LayerShape, Slab
from cache.transfer.coding import encode_slots, sums_of
from kernels.codecs.quantised import Fp8Codec


def test_an_altered_slot_is_not_coded() -> None:
    slab = Slab(shapes=[LayerShape(1, 8, 8)] * 2, dtype=torch.float32, num_slots=4, pinned=False)
    for layer in range(2):
        slab.segments(layer).normal_()
    slab.seal(0, 1, 2, 3)
    codec = Fp8Codec([((1, 8), (1, 8))] * 2)
    assert encode_slots(codec, slab, [3, 1, 2]).taken == [True, True, True]
    slab.segment(1, 1)[100] ^= 1
    coded = encode_slots(codec, slab, [3, 1, 2])
    assert coded.taken == [True, False, True]
    assert [len(segments) for segments in coded.layers] == [2, 2]
    assert coded.checksums == b"".join(b"".join(sums_of(segments)) for segments in coded.layers)
