"""Where one load reads from, layer by layer."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np
import torch
from torch import Tensor

from cache.block import BlockKey
from cache.plan import BlockLoad
from cache.tiers.disk import DiskTier
from cache.tiers.dram import Slab
from cache.tiers.extent_reader import ExtentReader


class LayerSource:
    """The blocks of one load, layer by layer: out of their slots, or off the disk into a slot or a bounce buffer.
    `places` are their indices in `blocks` in the order in which `segments` has them; `unsealed` are those in DRAM whose
    slots nobody vouches for."""

    def __init__(self, blocks: Sequence[BlockLoad], slab: Slab, disk: DiskTier | None) -> None:
        self._blocks, self._slab, self._disk = blocks, slab, disk
        self._by_extent: dict[int, list[int]] = {}  # extent id -> places in `blocks`
        self._readers: dict[int, ExtentReader] = {}
        for place, block in enumerate(blocks):
            if block.extent is not None:
                self._by_extent.setdefault(block.extent[0], []).append(place)
                if block.slot is not None:
                    slab.unseal(block.slot)
        self._num_disk = sum(len(places) for places in self._by_extent.values())
        in_slots = [place for place, block in enumerate(blocks) if block.slot is not None]
        passing = [place for places in self._by_extent.values() for place in places if blocks[place].slot is None]
        self.places = in_slots + passing
        in_dram = [blocks[place] for place in self.places if blocks[place].extent is None]
        self.unsealed = [block.key for block in in_dram if not slab.is_sealed(block.slot)]
        self._checked = np.array([blocks[place].extent is None for place in self.places])
        self._sums = np.zeros((slab.num_layers, len(blocks)), np.uint64)
        if not self.unsealed:
            self._sums[:, self._checked] = slab.sums([block.slot for block in in_dram if block.slot is not None])
        self._slots = torch.tensor([slot for block in blocks if (slot := block.slot) is not None], dtype=torch.int64)
        # Two buffers for all layers, for one may be read while the one before it is placed. Not one for each: fresh
        # memory costs more than what is written to it.
        self._passing = {place: number for number, place in enumerate(passing)}
        self._bounce_bytes = len(passing) * max(slab.segment_bytes)
        self._bounce = torch.empty(2 * self._bounce_bytes, dtype=torch.uint8)
        self._bounce_view = memoryview(self._bounce.numpy().data)

    def __enter__(self) -> "LayerSource":
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    def checks(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Which blocks are still to be compared with a checksum, and with which, in the order of `places`: those in
        DRAM, for what comes off the disk is checked on the way. See `kernels.block_writer.Checks`."""
        return self._checked, self._sums[layer]

    def altered(self, layer: int) -> list[BlockKey]:
        """Those in DRAM that are not what they were when their slots were sealed."""
        in_dram = [(block.key, block.slot) for block in self._blocks if block.extent is None]
        return [key for key, slot in in_dram if slot is None or not self._slab.is_intact(layer, slot)]

    def segments(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Where a layer that was read lies until the next but one is, without a copy: memory [segments, elements], and
        which of its segments, int64. All parts together are the blocks in the order of `places`."""
        parts = []
        if len(self._slots):
            parts.append((self._slab.segments(layer), self._slots))
        if self._passing:
            start, size = self._bounce_start(layer), len(self._passing) * self._slab.segment_bytes[layer]
            elements = self._bounce[start : start + size].view(self._slab.dtype)
            parts.append((elements.view(len(self._passing), -1), torch.arange(len(self._passing))))
        return parts

    def read(self, layer: int) -> None:
        """Bring one layer of the blocks that are on disk, and check it. Raises BlockMissing."""
        for extent_id, places in self._by_extent.items():
            reader = self._readers.get(extent_id)
            if reader is None:
                assert self._disk is not None
                reader = self._readers[extent_id] = self._disk.reader(extent_id)
            outs = [self._target(layer, place) for place in places]
            indices = [extent[1] for place in places if (extent := self._blocks[place].extent) is not None]
            reader.read(layer, indices, outs)

    def _target(self, layer: int, place: int) -> memoryview:
        slot = self._blocks[place].slot
        if slot is not None:
            return self._slab.segment(layer, slot)
        size = self._slab.segment_bytes[layer]
        start = self._bounce_start(layer) + self._passing[place] * size
        return self._bounce_view[start : start + size]

    def _bounce_start(self, layer: int) -> int:
        return layer % 2 * self._bounce_bytes

    def seal_passed(self) -> None:
        """Blocks that came from disk into slots are complete there."""
        for block in self._blocks:
            if block.extent is not None and block.slot is not None:
                extent_id, index = block.extent
                self._slab.seal_as(block.slot, self._readers[extent_id].checksums(index))

    def dram_bytes(self, layer: int) -> int:
        return (len(self._blocks) - self._num_disk) * self._slab.segment_bytes[layer]

    def account(self, reading_s: float, placing_s: float) -> dict[str, tuple[int, float]]:
        """direction -> bytes and seconds of a load that is done."""
        dram, disk = len(self._blocks) - self._num_disk, self._num_disk
        share = disk / len(self._blocks)
        parts = {
            "dram_to_hbm": (dram, (0.0 if disk else reading_s) + placing_s * (1 - share)),
            "disk_to_hbm": (disk, reading_s + placing_s * share),
        }
        return {
            direction: (count * self._slab.slot_bytes, seconds)
            for direction, (count, seconds) in parts.items()
            if count
        }


class ReadAhead:
    """Reads a layer while the one before it is placed. One thread at a time; leave it by `close`.

    A load beside a computation on all processors holds it up for as long as it keeps any one of them: two threads are
    done sooner. 142 tokens behind 1,580 from disk, 125 M model, two cores: first token after 65 ms instead of 77.
    """

    def __init__(self, read: Callable[[int], None], num_layers: int, executor: Executor) -> None:
        """read: as `LayerSource.read`, and what else belongs to it; called for one layer at a time, in order."""
        self._read, self._num_layers, self._executor = read, num_layers, executor
        self._next: Future[None] | None = None

    def read(self, layer: int) -> None:
        """Bring a layer, the one behind the last, and begin with the next. Raises what reading raised."""
        read, self._next = self._next or self._executor.submit(self._read, layer), None
        read.result()
        if layer + 1 < self._num_layers:
            self._next = self._executor.submit(self._read, layer + 1)

    def close(self) -> None:
        """Nothing is read any more when it returns."""
        if self._next is not None:
            self._next.cancel()
            wait([self._next])
