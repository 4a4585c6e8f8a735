"""Provides the bytes of a load, layer by layer: from slots in DRAM, or from extents on disk or in Redis."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Sequence
from itertools import pairwise
from mmap import mmap
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_file import io_buffer
from reprise.cache.storage.extent_format import ALIGNMENT
from reprise.cache.storage.extent_reader import ExtentReader, Landed
from reprise.cache.storage.extent_store import ExtentStore
from reprise.cache.storage.slab import CodedSlab, Segments, Slab
from reprise.cache.transfer.coding import Decoder, decoder_of, sums_of

LAYERS_LANDED = 4  # layers in memory per load: one being placed, one being read, two spare for a device that stutters
LANDING_BYTES = 32 << 20  # memory of a load; more layers may be there at once if they fit
KEPT_BYTES = 64 << 20  # landing memory kept for the next load: touching fresh memory costs more than filling it
_PIECE_BYTES = 2 << 20
_MOST_COPIES = 64  # most copies for a layer of a load
Sums = np.ndarray  # checksums as numbers, uint64
_NO_SUMS, _COMPARED = np.zeros((0, 0), np.uint64), np.zeros(0, np.uint64)


class LayerSource(Protocol):
    """The bytes of a load's blocks, layer by layer, for a `Loader`. Used by one thread at a time, unless a class says
    otherwise."""

    @property
    def blocks(self) -> Sequence[BlockLoad]:
        """The blocks of the load, in the order in which `segments` has them."""
        ...

    def prepare(self, layer: int, *, together: bool) -> list[BlockKey]:
        """Make a layer ready for `segments`, `sums` and `altered`, unless it is ready: blocks that are compressed, or
        stored as activations, are checked and decoded. together: whether to use torch's team of threads. Returns the
        blocks whose bytes are not what was stored; if there is one, the layer must not be written to HBM pages."""
        ...

    def segments(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return (the memory of a layer, [segments, elements]; the index in it of each block's segment, int64
        [blocks])."""
        ...

    def sums(self, layer: int) -> Sums:
        """Return the checksums that a layer's segments must have: uint64 [blocks], or [0] if `prepare` has compared
        them already."""
        ...

    def altered(self, layer: int) -> list[BlockKey]:
        """Return the blocks whose segments do not match their checksums."""
        ...


class SlotSource:
    """A source of blocks in DRAM. unsealed: the blocks whose slots are not complete, so that no checksum vouches for
    them. If there is one, no other method may be called."""

    def __init__(self, blocks: Sequence[BlockLoad], slab: Segments) -> None:
        self.blocks, self._slab = blocks, slab
        slots = [block.slot for block in blocks if block.slot is not None]
        self.unsealed = [block.key for block in blocks if not slab.is_sealed(block.slot)]
        self._slots = torch.tensor(slots, dtype=torch.int64)
        self._sums: Sums = np.ascontiguousarray(slab.sums(slots)) if not self.unsealed else _NO_SUMS

    def prepare(self, layer: int, *, together: bool) -> list[BlockKey]:
        return []

    def segments(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._slab.segments(layer), self._slots

    def sums(self, layer: int) -> Sums:
        sums: Sums = self._sums[layer]
        return sums

    def altered(self, layer: int) -> list[BlockKey]:
        wrong = self._slab.sums_now(layer, self._slots.numpy()) != self._sums[layer]
        return [self.blocks[number].key for number in np.flatnonzero(wrong).tolist()]


class DecodedSource(SlotSource):
    """A source of blocks in DRAM that are compressed or activations: `prepare` checks and decodes them."""

    def __init__(self, blocks: Sequence[BlockLoad], slots: Segments, decoder: Decoder) -> None:
        super().__init__(blocks, slots)
        self._decoder = decoder
        self._chosen = torch.arange(len(blocks))

    def prepare(self, layer: int, *, together: bool) -> list[BlockKey]:
        memory = self._slab.segments(layer).view(torch.uint8)
        stored = brought(memory, self._slots, self._decoder.device)
        # While segments are copied to a device, they are compared in their slots.
        on_host = stored.device.type == "cpu"
        now = sums_of(stored) if on_host else self._slab.sums_now(layer, self._slots.numpy())
        wrong = now != self._sums[layer]
        if wrong.any():
            return [self.blocks[number].key for number in np.flatnonzero(wrong).tolist()]
        self._decoder.decode(layer, stored, together=together)
        return []

    def segments(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._decoder.raw, self._chosen

    def sums(self, layer: int) -> Sums:
        return _COMPARED

    def altered(self, layer: int) -> list[BlockKey]:
        return []  # compared before they were decoded


def brought(memory: Tensor, chosen: Tensor, device: torch.device) -> Tensor:
    """Return the chosen segments on a device, [chosen, elements]. Segments that are adjacent in the host's memory go to
    CUDA in one copy, directly from the page-locked slots, so that no processor touches them. Scattered segments are
    gathered first, because every copy costs a call."""
    if device.type == "cpu" or memory.is_cuda:
        return memory.index_select(0, chosen.to(memory.device)).to(device)
    numbers = chosen.numpy()
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    there = torch.empty(len(chosen), memory.shape[1], dtype=memory.dtype, device=device)
    if len(starts) > _MOST_COPIES:
        gathered = torch.empty(there.shape, dtype=memory.dtype, pin_memory=memory.is_pinned())
        torch.index_select(memory, 0, chosen, out=gathered)
        return there.copy_(gathered, non_blocking=True)
    for start, stop in pairwise(starts):
        first = int(numbers[start])
        there[start:stop].copy_(memory[first : first + stop - start], non_blocking=True)
    return there


def slot_source(blocks: Sequence[BlockLoad], slab: Slab, coded: CodedSlab | None) -> SlotSource:
    """Return the source of blocks in DRAM. coded: the slab of compressed blocks, if all of these are compressed."""
    decoder = decoder_of(slab, coded, len(blocks))
    return (
        SlotSource(blocks, slab)
        if decoder is None
        else DecodedSource(blocks, slab if coded is None else coded, decoder)
    )


def layers_landed(sizes: Sequence[int], num_blocks: int) -> int:
    """Return the most layers of a load that may lie in host memory at one time: read from disk or Redis, but not yet
    copied into HBM pages. At least LAYERS_LANDED if the load has as many; more if they fit into LANDING_BYTES. sizes:
    bytes of a block's segment, by layer. num_blocks: number of blocks in the load."""
    return min(len(sizes), max(LAYERS_LANDED, LANDING_BYTES // _room(sizes, num_blocks)))


def _room(sizes: Sequence[int], num_blocks: int) -> int:
    """Return the bytes of memory that suffice for any one layer of a load."""
    return -(-num_blocks * max(sizes) // ALIGNMENT) * ALIGNMENT


class Landings:
    """A pool of the memory into which loads read, reused from one load to the next. Thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[mmap] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> mmap:
        """Return at least `size` bytes of memory. Raises OSError if there is none."""
        with self._lock:
            for memory in self._kept:
                if len(memory) >= size:
                    self._kept.remove(memory)
                    return memory
        return io_buffer(-(-size // _PIECE_BYTES) * _PIECE_BYTES)

    def give_back(self, memory: mmap) -> None:
        """Return memory to the pool for the next load. Nothing may write to it any more."""
        if len(memory) > KEPT_BYTES:
            return  # it would only drive out the others
        dropped = []  # unmapped after the lock was released
        with self._lock:
            self._kept.append(memory)
            while sum(map(len, self._kept)) > KEPT_BYTES:
                dropped.append(self._kept.popleft())


class LandedSource(ABC):
    """A source of blocks on disk or in Redis. A layer is read into memory unchanged, checked by the thread that places
    it, and copied from there into slots if DRAM is to have it too. Compressed blocks and activations are checked and
    decoded by `prepare`.

    Making one raises MemoryError if there is no room to read into; end with `close`. One thread may call `read` while
    another places layers that were read; up to `layers_landed` layers may be in memory. coded: the slab of compressed
    blocks, if all of these are compressed.
    """

    def __init__(
        self, blocks: Sequence[BlockLoad], slab: Slab, landings: Landings, coded: CodedSlab | None = None
    ) -> None:
        self._slab, self._landings = slab, landings
        self._keeping: Segments = slab if coded is None else coded  # memory whose slots the blocks pass through
        self._decoder = decoder_of(slab, coded, len(blocks))
        self._sizes = self._keeping.segment_bytes
        by_extent: dict[int | bytes, list[tuple[int, BlockLoad]]] = {}  # extent -> places in it, and their blocks
        for block in blocks:
            address = block.extent or block.redis
            assert address is not None
            by_extent.setdefault(address[0], []).append((address[1], block))
            if block.slot is not None:
                self._keeping.unseal(block.slot)
        for found in by_extent.values():
            found.sort(key=lambda one: one[0])
        self._places = {extent: [place for place, _ in found] for extent, found in by_extent.items()}
        self.blocks = [block for found in by_extent.values() for _, block in found]
        kept = [(number, block.slot) for number, block in enumerate(self.blocks) if block.slot is not None]
        self._kept = torch.tensor(kept, dtype=torch.int64).view(-1, 2).T
        self._checksums: list[tuple[bytes, ...]] = []  # checksums of each block, by layer
        self._sums: Sums = _NO_SUMS  # empty until the first layer is there
        self._chosen = torch.arange(len(self.blocks))
        self._room = _room(self._sizes, len(blocks))
        self._num_landed = layers_landed(self._sizes, len(blocks))
        try:
            self._memory = landings.take(self._num_landed * self._room)
        except OSError as error:
            raise MemoryError(f"no memory to read into: {error}") from error
        self._view = memoryview(self._memory)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._may_be_written = False  # whether a read that hangs may still write to the memory

    def close(self) -> None:
        if not self._may_be_written:
            self._landings.give_back(self._memory)

    def read(self, layer: int, count: int, landed: Landed) -> int:
        """Read `count` layers from `layer` on, unchecked, calling `landed` as `ExtentReader.land` does. Returns how
        many were read. Raises BlockMissing."""
        if not self._checksums:
            checksums = self._open()
            numbers = np.frombuffer(b"".join(b"".join(of_block) for of_block in checksums), ">u8")
            self._sums = np.ascontiguousarray(numbers.reshape(len(self.blocks), -1).T, np.uint64)
            self._checksums = checksums
        outs = [self._landed(number) for number in range(layer, layer + count)]
        return self._land(layer, outs, landed)

    @abstractmethod
    def _open(self) -> list[tuple[bytes, ...]]:
        """Find the extents. Returns the checksums of each block, by layer. Raises BlockMissing."""

    @abstractmethod
    def _land(self, layer: int, outs: Sequence[memoryview], landed: Landed) -> int:
        """Read the layers from `layer` on, one into each of `outs`. Returns how many were read. Raises BlockMissing."""

    def _landed(self, layer: int) -> memoryview:
        start = layer % self._num_landed * self._room
        return self._view[start : start + len(self.blocks) * self._sizes[layer]]

    def prepare(self, layer: int, *, together: bool) -> list[BlockKey]:
        """Check and decode a layer of compressed blocks or activations. together: whether to use torch's team of
        threads. Returns the blocks whose bytes are not what was stored."""
        if self._decoder is None:
            return []
        altered = self._altered(layer)
        if not altered:
            self._decoder.decode(layer, self._as_stored(layer), together=together)
        return altered

    def segments(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._decoder is not None:
            return self._decoder.raw, self._chosen
        return self._as_stored(layer).view(self._slab.dtype), self._chosen

    def _as_stored(self, layer: int) -> Tensor:
        """Return a layer as it was read: uint8 [blocks, segment bytes]."""
        start = layer % self._num_landed * self._room
        return self._tensor[start : start + len(self.blocks) * self._sizes[layer]].view(len(self.blocks), -1)

    def sums(self, layer: int) -> Sums:
        if self._decoder is not None:
            return _COMPARED
        sums: Sums = self._sums[layer]
        return sums

    def altered(self, layer: int) -> list[BlockKey]:
        """Return the blocks whose segments do not match their checksums; none for decoded blocks, which `prepare` has
        compared."""
        return self._altered(layer) if self._decoder is None else []

    def _altered(self, layer: int) -> list[BlockKey]:
        wrong = sums_of(self._as_stored(layer)) != self._sums[layer]
        return [self.blocks[number].key for number in np.flatnonzero(wrong).tolist()]

    def keep(self, layer: int) -> None:
        """Copy a layer that was checked into the DRAM slots that are to have it."""
        numbers, slots = self._kept
        if len(numbers):
            stored = self._as_stored(layer)
            kept = self._keeping.segments(layer)
            kept[slots] = stored.view(kept.dtype)[numbers]

    def seal(self) -> None:
        """Mark the slots as complete that `keep` has filled with all layers."""
        for number, slot in self._kept.T.tolist():
            self._keeping.seal_as(slot, self._checksums[number])

    @abstractmethod
    def tell_damage(self, keys: Container[BlockKey], layer: int) -> None:
        """Report damaged blocks to the tier that they were read from."""


class ExtentSource(LandedSource):
    """A source of blocks on disk."""

    def __init__(
        self,
        blocks: Sequence[BlockLoad],
        slab: Slab,
        disk: ExtentStore,
        landings: Landings,
        coded: CodedSlab | None = None,
    ) -> None:
        super().__init__(blocks, slab, landings, coded)
        self._disk = disk
        self._readers: dict[int, ExtentReader] = {}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        super().close()

    def _open(self) -> list[tuple[bytes, ...]]:
        checksums: list[tuple[bytes, ...]] = []
        for extent_id, places in self._places.items():
            assert isinstance(extent_id, int)
            reader = self._readers[extent_id] = self._disk.reader(extent_id)
            blocks = self.blocks[len(checksums) :]  # the extent's, and later ones
            checksums += [reader.checksums(p, block.key) for p, block in zip(places, blocks, strict=False)]
        return checksums

    def _land(self, layer: int, outs: Sequence[memoryview], landed: Landed) -> int:
        wanted = list(zip(self._readers.values(), self._places.values(), strict=True))
        try:
            return wanted[0][0].land(layer, wanted, outs, landed)
        except BlockMissing as missing:
            self._may_be_written = missing.reason == "deadline"
            raise

    def tell_damage(self, keys: Container[BlockKey], layer: int) -> None:
        for block in self.blocks:
            if block.key in keys and block.extent is not None:
                extent_id, place = block.extent
                self._readers[extent_id].tell_altered(layer, place)
