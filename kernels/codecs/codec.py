"""Defines the interfaces of codecs, which compress the blocks that a tier below HBM stores, and of decoders."""

from typing import Protocol

import torch
from torch import Tensor


class Decodes(Protocol):
    """A decoder of segments (a block's stored bytes in one layer) to the block's rows of K and V. Thread-safe; the
    segments may hold any bytes."""

    device: torch.device
    """The device on which `raw` has to be. Segments are on it or on the CPU."""

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        """Decode blocks. segments uint8 [blocks, bytes of a segment of this layer]; raw [blocks, elements] receives the
        keys of a block's 32 rows, un-rotated, and then their values. together: whether to use torch's team of threads,
        which must belong to the calling thread and be the one that numba uses."""
        ...


class Projection(Decodes, Protocol):
    """A decoder that makes K and V from activations, which are the input of a layer's attention. A segment holds the
    activations of 32 tokens, in the model's dtype."""

    widths: tuple[int, ...]
    """The elements of a token's activation, by layer."""
    row_elements: tuple[int, ...]
    """The elements of a token's K and V together, by layer."""


class Codec(Decodes, Protocol):
    """A codec that turns a layer's blocks into segments of one constant size, and back. Blocks are given raw, as the
    DRAM tier holds them: [K of 32 rows, without position][V of 32 rows], in the model's dtype.

    Thread-safe and deterministic: equal rows give equal bytes, whatever else is in the call. Loads have compared
    checksums before; even so, `decode` stays inside its arrays for any bytes, and turns any bytes into some numbers.
    """

    name: str  # with its parameters; part of the domain of the blocks' keys
    is_lossy: bool
    segment_bytes: tuple[int, ...]
    """The size of one block's segment, by layer. Layers may differ."""

    def on(self, device: torch.device) -> Decodes:
        """Return a decoder for pages on this device: one that runs on the device if that is possible, otherwise on the
        CPU. Decoded rows may differ between the two by the order of a sum."""
        ...

    def encode(self, layer: int, raw: Tensor, segments: Tensor) -> list[bool]:
        """Encode blocks. raw [blocks, elements]; segments uint8 [blocks, segment_bytes[layer]] receives the result.
        Returns for each block whether it could be encoded. It could not if one of its numbers is not finite, or if its
        code does not fit into the size; its bytes in `segments` then mean nothing."""
        ...
