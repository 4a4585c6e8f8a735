"""Encodes blocks on their way from DRAM to the tiers below, and decodes them on their way back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.storage.extent_format import checksum
from cache.storage.slab import Slab
from kernels.codecs.codec import Codec


@dataclass(frozen=True, slots=True)
class CodedSlots:
    """What a codec has made of blocks. taken: for each, whether it could be encoded; the rest is of those alone."""

    taken: list[bool]
    layers: list[Tensor]  # uint8 [blocks, segment bytes], by layer
    checksums: bytes  # layer by layer, as in an extent's header

    def segments(self, layer: int) -> list[memoryview]:
        """Return a layer's segments, back to back."""
        return [memoryview(self.layers[layer].view(-1).numpy().data)]


def encode_slots(codec: Codec, slab: Slab, slots: Sequence[int]) -> CodedSlots:
    """Encode sealed slots, which stay as they are. What is not as it was sealed is not taken: coded, it would get a
    checksum that vouches for it. Any thread; as long as it takes, nobody may write to the slots."""
    taken = np.ones(len(slots), np.bool_)
    layers, sealed = [], slab.sums(slots)
    for layer in range(slab.num_layers):
        segments = torch.empty(len(slots), codec.segment_bytes[layer], dtype=torch.uint8)
        raw = slab.segments(layer)[list(slots)]
        taken &= np.frombuffer(b"".join(sums_of(raw.view(torch.uint8))), ">u8") == sealed[layer]
        taken &= codec.encode(layer, raw, segments)
        layers.append(segments)
    kept = layers if taken.all() else [segments[torch.from_numpy(taken)] for segments in layers]
    return CodedSlots(taken.tolist(), kept, b"".join(b"".join(sums_of(segments)) for segments in kept))


def decode_segments(codec: Codec, layer: int, segments: Tensor, raw: Tensor) -> list[bytes]:
    """Decode blocks that were compared with their checksums. segments uint8 [blocks, segment bytes]; raw [blocks,
    elements] receives the rows. Returns the checksums of what came out, by which memory is watched from then on."""
    codec.decode(layer, segments, raw)
    return sums_of(raw.view(torch.uint8))


def sums_of(segments: Tensor) -> list[bytes]:
    """Return the checksum of each row of a contiguous uint8 tensor."""
    view, size = memoryview(segments.view(-1).numpy().data), segments.shape[1]
    return [checksum(view[start : start + size]) for start in range(0, len(view), size)]
