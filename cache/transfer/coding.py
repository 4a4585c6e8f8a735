"""Compresses blocks in DRAM with a codec, and decodes them, or projects activations to K and V, while they are loaded
into HBM."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.kernels.checksums import Sums, checksums
from reprise.kernels.codecs.codec import Codec, Decodes

PART_BYTES = 64 << 20  # most bytes of rows that a device decodes at once
DECODING_FACTOR = 6  # decoding takes at most so many times PART_BYTES


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """The blocks that a codec has compressed. taken: for each block given, whether it could be compressed. The other
    fields have only the compressed ones."""

    taken: list[bool]
    layers: list[Tensor]  # uint8 [blocks, segment bytes], by layer
    checksums: bytes  # layer by layer, as in an extent's header

    def segments(self, layer: int) -> list[memoryview]:
        """Return a layer's segments, back to back."""
        return [memoryview(self.layers[layer].view(-1).numpy().data)]


def encode_slots(codec: Codec, slab: Slab, slots: Sequence[int]) -> EncodedBlocks:
    """Compress the blocks in sealed (complete) slots, which stay unchanged. A slot whose bytes have changed since it
    was sealed is not taken: its compressed form would get a checksum that is right for wrong bytes. May be called by
    any thread; no thread may write to the slots meanwhile."""
    taken = np.ones(len(slots), np.bool_)
    layers, sealed = [], slab.sums(slots)
    for layer in range(slab.num_layers):
        segments = torch.empty(len(slots), codec.segment_bytes[layer], dtype=torch.uint8)
        raw = slab.segments(layer)[list(slots)]
        taken &= sums_of(raw.view(torch.uint8)) == sealed[layer]
        taken &= codec.encode(layer, raw, segments)
        layers.append(segments)
    kept = layers if taken.all() else [segments[torch.from_numpy(taken)] for segments in layers]
    return EncodedBlocks(taken.tolist(), kept, b"".join(sums_of(segments).astype(">u8").tobytes() for segments in kept))


def encode_into(coded: CodedSlab, targets: Sequence[int], slab: Slab, slots: Sequence[int]) -> list[bool]:
    """Compress the blocks in sealed (complete) slots into the slots `targets`, and seal those. Returns for each whether
    it could be compressed; if not, its target stays unsealed. May be called by any thread; no other may write to the
    slots or use the targets meanwhile."""
    for target in targets:
        coded.unseal(target)
    encoded = encode_slots(coded.codec, slab, slots)
    filled = [target for target, is_taken in zip(targets, encoded.taken, strict=True) if is_taken]
    for layer, segments in enumerate(encoded.layers):
        coded.segments(layer)[filled] = segments
    coded.seal_all_as(filled, encoded.checksums)
    return encoded.taken


class Decoder:
    """A decoder of the layers of one load, one after the other, into memory of its own. Used by the thread that places
    the load."""

    def __init__(self, decodes: Decodes, slab: Slab, num_blocks: int) -> None:
        self._decodes, self._slab, self._num_blocks = decodes, slab, num_blocks
        self._device = decodes.device
        self.raw = torch.empty(0)
        """The rows of the layer that was decoded last, [blocks, elements]."""

    @property
    def device(self) -> torch.device:
        """The device on which `raw` lies. Segments may lie on it too."""
        return self._device

    def decode(self, layer: int, segments: Tensor, *, together: bool) -> None:
        """Decode a layer of blocks into `raw`. segments uint8 [blocks, segment bytes], compared with their checksums.
        together: whether to use torch's team of threads. Raises RuntimeError if a device has no memory
        (`reprise.kernels.device_errors`)."""
        shape = self._num_blocks, self._slab.block_elements[layer]
        if self.raw.shape != shape:
            pinned = self._device.type == "cpu" and self._slab.segments(layer).is_pinned()
            self.raw = torch.empty(shape, dtype=self._slab.dtype, device=self._device, pin_memory=pinned)
        if self._device.type == "cpu":
            self._decodes.decode(layer, segments, self.raw, together=together)
            return
        most = max(1, PART_BYTES // (shape[1] * self.raw.element_size()))
        for some, rows in zip(segments.split(most), self.raw.split(most), strict=True):
            self._decodes.decode(layer, some, rows)


def decoder_of(slab: Slab, coded: CodedSlab | None, num_blocks: int) -> Decoder | None:
    """Return the decoder that makes rows of a load's blocks; None if they are rows already. coded: the slab of
    compressed blocks, if all of the load's blocks are compressed."""
    decodes: Decodes | None = slab.projection if coded is None else coded.decodes
    return None if decodes is None else Decoder(decodes, slab, num_blocks)


def sums_of(segments: Tensor) -> Sums:
    """Return the checksum of each row of a contiguous uint8 tensor."""
    return checksums(segments.view(-1).numpy(), segments.shape[1], np.arange(len(segments)))
