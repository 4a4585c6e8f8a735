"""Tests what is coded of slots: what their checksums no longer vouch for is not, and coded slots vouch for the rest."""

import pytest
import torch

from benchmarks.texts.quantised import Fp8Codec
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.moves import BlockLoad, CapturePiece
from reprise.cache.storage.slab import CodedSlab, LayerShape, Slab
from reprise.cache.transfer import coding
from reprise.cache.transfer.capture import Captured, CapturedRows
from reprise.cache.transfer.coding import Decoder, encode_into, encode_slots, sums_of
from reprise.cache.transfer.device_streams import HostStream
from reprise.cache.transfer.layer_source import slot_source
from reprise.cache.transfer.row_saver import place_rows
from tests.cache.intact import is_intact


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
    assert coded.checksums == b"".join(sums_of(segments).astype(">u8").tobytes() for segments in coded.layers)


def test_blocks_are_encoded_into_slots_that_vouch_for_them() -> None:
    slab = Slab(shapes=[LayerShape(1, 8, 8)] * 2, dtype=torch.float32, num_slots=4, pinned=False)
    for layer in range(2):
        slab.segments(layer).normal_()
    slab.seal(0, 1, 2, 3)
    slab.segment(0, 2)[3] ^= 1
    coded = CodedSlab(Fp8Codec([((1, 8), (1, 8))] * 2), num_slots=6)
    assert encode_into(coded, [5, 0, 3], slab, [1, 2, 3]) == [True, False, True]
    assert [coded.is_sealed(slot) for slot in range(6)] == [False, False, False, True, False, True]
    decoder = Decoder(coded.codec, slab, 2)
    for layer in range(2):
        assert is_intact(coded, layer, 5)
        assert is_intact(coded, layer, 3)
        decoder.decode(layer, coded.segments(layer)[[5, 3]], together=False)
        torch.testing.assert_close(decoder.raw, slab.segments(layer)[[1, 3]], rtol=0.07, atol=0.01)
    coded.segment(1, 3)[0] ^= 1
    assert not is_intact(coded, 1, 3)


class Sevens:
    """Stands for a device that decodes."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.parts: list[int] = []

    def decode(self, layer: int, segments: torch.Tensor, raw: torch.Tensor, *, together: bool = False) -> None:
        assert segments.device == raw.device == self.device
        self.parts.append(len(segments))
        raw.fill_(7 + layer)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loads_ask_whoever_decodes_for_the_pages(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in parts, if that is a device."""
    decodes = Sevens(device)
    monkeypatch.setattr(coding, "PART_BYTES", BLOCK_TOKENS * 16 * 4)
    slab = Slab(shapes=[LayerShape(1, 8, 8)] * 2, dtype=torch.float32, num_slots=1, pinned=False)
    coded = CodedSlab(Fp8Codec([((1, 8), (1, 8))] * 2), num_slots=2, decodes=decodes)
    coded.seal(0, 1)
    blocks = [BlockLoad(bytes([slot]) * 16, BLOCK_TOKENS, slot, None, 0, 0, 0) for slot in range(2)]
    source = slot_source(blocks, slab, coded)
    for layer in range(2):
        assert source.prepare(layer, together=False) == []
        rows, chosen = source.segments(layer)
        assert device == "meta" or (rows[chosen] == 7 + layer).all()
    assert decodes.parts == ([2, 2] if device == "cpu" else [1] * 4)
    coded.segment(0, 1)[0] ^= 1
    assert source.prepare(0, together=False) == [blocks[1].key]


class Doubling:
    """K and V of one head of 3 dims each: the activation, and twice the activation."""

    widths, row_elements, device = (3, 3), (6, 6), torch.device("cpu")

    def decode(self, layer: int, segments: torch.Tensor, raw: torch.Tensor, *, together: bool = False) -> None:
        x = segments.view(torch.float32)
        raw.copy_(torch.cat([x, 2 * x], 1))


def test_slots_of_activations_are_loaded_as_k_and_v_of_them() -> None:
    shapes = [LayerShape(1, 3, 0)] * 2
    slab = Slab(shapes=shapes, dtype=torch.float32, num_slots=3, pinned=False, projection=Doubling())
    assert slab.segment_bytes == [BLOCK_TOKENS * 3 * 4] * 2
    assert slab.block_elements == [BLOCK_TOKENS * 6] * 2
    step = Captured(layers=[0, 1], inputs=[torch.arange(120.0).view(40, 1, 3) + layer for layer in range(2)])
    place_rows(
        slab,
        [CapturedRows(step, [CapturePiece(1, 2, 0, 32), CapturePiece(33, 0, 0, 7)], HostStream().fence())],
        range(2),
    )
    slab.clear_behind(0, 7)
    slab.seal(0, 2)
    blocks = [BlockLoad(bytes([slot]) * 16, rows, slot, None, 0, 0, 0) for slot, rows in ((0, 7), (2, BLOCK_TOKENS))]
    source = slot_source(blocks, slab, None)
    for layer in range(2):
        assert source.prepare(layer, together=False) == []
        rows, chosen = source.segments(layer)
        x = step.inputs[layer].flatten()
        assert torch.equal(rows[chosen[1]], torch.cat([x[3:99], 2 * x[3:99]]))
        assert torch.equal(rows[chosen[0], :21], x[99:120])
        assert not rows[chosen[0], 21:96].any()
        assert source.sums(layer).size == 0  # `prepare` has compared what lies there
    slab.segment(1, 2)[5] ^= 1
    assert source.prepare(1, together=False) == [blocks[1].key]
