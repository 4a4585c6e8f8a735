"""Tests what is coded of slots: what their checksums no longer vouch for is not, and coded slots vouch for the rest."""

import torch

from cache.storage.slab import CodedSlab, LayerShape, Slab
from cache.transfer.coding import Decoder, encode_into, encode_slots, sums_of
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


def test_blocks_are_encoded_into_slots_that_vouch_for_them() -> None:
    slab = Slab(shapes=[LayerShape(1, 8, 8)] * 2, dtype=torch.float32, num_slots=4, pinned=False)
    for layer in range(2):
        slab.segments(layer).normal_()
    slab.seal(0, 1, 2, 3)
    slab.segment(0, 2)[3] ^= 1
    coded = CodedSlab(Fp8Codec([((1, 8), (1, 8))] * 2), num_slots=6)
    assert encode_into(coded, [5, 0, 3], slab, [1, 2, 3]) == [True, False, True]
    assert [coded.is_sealed(slot) for slot in range(6)] == [False, False, False, True, False, True]
    decoder = Decoder(coded, slab, 2)
    for layer in range(2):
        assert coded.is_intact(layer, 5)
        assert coded.is_intact(layer, 3)
        decoder.decode(layer, coded.segments(layer)[[5, 3]], together=False)
        torch.testing.assert_close(decoder.raw, slab.segments(layer)[[1, 3]], rtol=0.07, atol=0.01)
        assert decoder.sums.tolist() == [int.from_bytes(sums) for sums in sums_of(decoder.raw.view(torch.uint8))]
    coded.segment(1, 3)[0] ^= 1
    assert not coded.is_intact(1, 3)
