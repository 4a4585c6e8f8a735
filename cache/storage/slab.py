"""Holds the memory of the DRAM tier: one slab of slots. Each slot has one block's KV with un-rotated keys, or the
activations from which its KV is made. With a codec there is a second slab, of slots for blocks that the codec has
compressed (coded slots).

Memory is layer-major: all slots of a layer lie together. A slot's part of a layer is its *segment*, [K of 32 rows][V of
32 rows], as on disk, or [32 activations]. So one call gathers, reads or writes a layer of many blocks (AttentionStore
§3.2.1).
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.storage.extent_format import ALIGNMENT
from reprise.kernels.checksums import checksums
from reprise.kernels.codecs.codec import Codec, Decodes, Projection


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's data in one layer: its K and V, or an activation, which counts as K of one head."""

    kv_heads: int
    k_dim: int
    v_dim: int  # 0: there is no V


def row_segments(shapes: Sequence[LayerShape], dtype: torch.dtype) -> list[int]:
    """Return the bytes of a block's rows in each layer."""
    return [BLOCK_TOKENS * s.kv_heads * (s.k_dim + s.v_dim) * dtype.itemsize for s in shapes]


class Segments:
    """The memory of slots, with a checksum per slot and layer. Any thread may use it; callers see to it that no slot is
    read while it is written. segment_bytes: of one slot, by layer. pinned: whether to page-lock the memory, for
    asynchronous copies to and from CUDA."""

    def __init__(self, *, segment_bytes: Sequence[int], num_slots: int, pinned: bool) -> None:
        self.num_slots = num_slots
        self.num_layers = len(segment_bytes)
        self.segment_bytes = list(segment_bytes)
        self._memory = [_memory(num_slots, size) for size in self.segment_bytes]
        if pinned:
            pin(self, self._memory)
        self.slot_bytes = sum(self.segment_bytes)  # size of a slot in all layers together
        self._streams = [memory.view(-1).numpy() for memory in self._memory]
        self._views = [memoryview(stream.data) for stream in self._streams]
        self._checksums = np.zeros((num_slots, self.num_layers), ">u8")  # byte order of an extent's header
        self._is_sealed = bytearray(num_slots)

    def segments(self, layer: int) -> Tensor:
        """Return a layer's memory: uint8 [slots, bytes of a segment]."""
        return self._memory[layer]

    def segment(self, layer: int, slot: int) -> memoryview:
        """Return a slot's bytes in one layer."""
        return self.span(layer, slot, slot + 1)

    def span(self, layer: int, first: int, stop: int) -> memoryview:
        """Return the bytes of one layer in the slots `first` to `stop` - 1, back to back."""
        size = self.segment_bytes[layer]
        return self._views[layer][first * size : stop * size]

    def seal(self, *slots: int) -> None:
        """Mark slots as complete and compute their checksums."""
        chosen = np.array(slots, np.int64)
        self._checksums[chosen] = np.stack([self.sums_now(layer, chosen) for layer in range(self.num_layers)], 1)
        for slot in slots:
            self._is_sealed[slot] = True

    def seal_as(self, slot: int, checksums: Sequence[bytes]) -> None:
        """Mark a slot as complete. checksums: those of its segments, by layer; the caller has compared the bytes with
        them."""
        self._checksums[slot] = np.frombuffer(b"".join(checksums), ">u8")
        self._is_sealed[slot] = True

    def seal_all_as(self, slots: Sequence[int], checksums: bytes) -> None:
        """Mark several slots as complete. checksums: layer by layer, in the form that `checksums` returns; the bytes
        must have been compared with them."""
        self._checksums[list(slots)] = np.frombuffer(checksums, ">u8").reshape(self.num_layers, len(slots)).T
        for slot in slots:
            self._is_sealed[slot] = True

    def unseal(self, slot: int) -> None:
        """Mark a slot as incomplete, because it is about to be filled."""
        self._is_sealed[slot] = False

    def is_sealed(self, slot: int | None) -> bool:
        return slot is not None and bool(self._is_sealed[slot])

    def sums(self, slots: Sequence[int]) -> np.ndarray:
        """Return the checksums of sealed slots as numbers, uint64 [layers, slots]."""
        return self._checksums[list(slots)].T.astype(np.uint64)

    def sums_now(self, layer: int, slots: NDArray[np.int64]) -> np.ndarray:
        """Compute the checksums of a layer's segments as they are now, uint64 [slots]."""
        return checksums(self._streams[layer], self.segment_bytes[layer], slots)

    def checksums(self, slots: Sequence[int]) -> bytes:
        """Return the checksums of sealed slots, layer by layer, in the form that an extent's header has. They are from
        the time of sealing: a later change in memory shows when the extent is read."""
        return self._checksums[list(slots)].T.tobytes()


class Slab(Segments):
    """The DRAM slots of blocks that no codec has compressed. projection: makes K and V from the slots' rows, which are
    activations; None: the rows are K and V."""

    def __init__(
        self,
        *,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        num_slots: int,
        pinned: bool,
        projection: Projection | None = None,
    ) -> None:
        self.dtype, self.projection = dtype, projection
        self._row_bytes = [tuple(s.kv_heads * dim * dtype.itemsize for dim in (s.k_dim, s.v_dim)) for s in shapes]
        super().__init__(segment_bytes=row_segments(shapes, dtype), num_slots=num_slots, pinned=pinned)
        of_token = [sum(row_bytes) // dtype.itemsize for row_bytes in self._row_bytes]
        self.block_elements = [BLOCK_TOKENS * n for n in (projection.row_elements if projection else of_token)]
        """Number of elements of a block's K and V, by layer."""
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        for shape, memory in zip(shapes, self._memory, strict=True):
            elements = memory.view(dtype)
            split = BLOCK_TOKENS * shape.kv_heads * shape.k_dim
            self._k.append(elements[:, :split].view(num_slots, BLOCK_TOKENS, shape.kv_heads, shape.k_dim))
            self._v.append(elements[:, split:].view(num_slots, BLOCK_TOKENS, shape.kv_heads, shape.v_dim))

    def k(self, layer: int) -> Tensor:
        """Return a layer's keys, un-rotated: [slots, 32, kv_heads, k_dim]; or its activations, [slots, 32, 1,
        width]."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """Return a layer's values: [slots, 32, kv_heads, v_dim]."""
        return self._v[layer]

    def parts(self, layers: Sequence[int]) -> list[Tensor]:
        """Return the slots' memory in some layers as tensors: K of each layer, then V of each layer, if there is
        any."""
        return [*map(self.k, layers), *(() if self.projection is not None else map(self.v, layers))]

    def segments(self, layer: int) -> Tensor:
        """Return a layer's memory as [slots, elements of a segment]: the K of each slot, then its V; or its
        activations."""
        return self._memory[layer].view(self.dtype)

    def clear_behind(self, slot: int, num_rows: int) -> None:
        """Set the rows from `num_rows` on to zero. An open block does not have them yet, and they hold another block's
        data."""
        if num_rows == BLOCK_TOKENS:
            return
        for layer, row_bytes in enumerate(self._row_bytes):
            segment, begin = self.segment(layer, slot), 0
            for size in row_bytes:  # the rows of K, then all rows of V
                end = begin + BLOCK_TOKENS * size
                segment[begin + num_rows * size : end] = bytes((BLOCK_TOKENS - num_rows) * size)
                begin = end


class CodedSlab(Segments):
    """The slots for blocks that a codec has compressed. decodes: decoder for pages of a device; None: the codec itself,
    on CPU."""

    def __init__(self, codec: Codec, *, num_slots: int, decodes: Decodes | None = None) -> None:
        self.codec, self.decodes = codec, decodes or codec
        pinned = self.decodes.device.type == "cuda"
        super().__init__(segment_bytes=codec.segment_bytes, num_slots=num_slots, pinned=pinned)


def _memory(num_slots: int, size: int) -> Tensor:
    """Allocate uint8 [slots, size] that begins at a memory page, so that disks read and write there without a copy. It
    is made by numpy so that torch's storage begins there too: torch decides by the first byte of a storage whether it
    is page-locked."""
    room = torch.empty(num_slots * size + ALIGNMENT, dtype=torch.uint8)
    begin = -room.data_ptr() % ALIGNMENT
    return torch.from_numpy(room.numpy()[begin : begin + num_slots * size]).view(num_slots, size)


def pin(owner: object, memory: Sequence[Tensor]) -> None:
    """Page-lock memory until `owner` is freed. torch's own way rounds each piece up to a power of two, which is up to
    twice what is asked for. Raises MemoryError."""
    cuda = torch.cuda.cudart()
    for piece in memory:
        if piece.numel():
            if (status := int(cuda.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))) != 0:
                raise MemoryError(f"CUDA cannot page-lock {piece.nbytes >> 20} MiB (error {status})")
            weakref.finalize(owner, cuda.cudaHostUnregister, piece.data_ptr()).atexit = False
