"""Where one load reads from, layer by layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.block import BlockKey
from cache.plan import BlockLoad
from cache.tiers.disk import DiskTier
from cache.tiers.dram import Slab
from cache.tiers.extent_reader import ExtentReader


class LayerSource:
    """The blocks of one load, layer by layer: out of their slots, or off the disk into a slot or a bounce buffer."""

    def __init__(self, blocks: Sequence[BlockLoad], slab: Slab, disk: DiskTier | None) -> None:
        self._blocks, self._slab, self._disk = blocks, slab, disk
        self._by_extent: dict[int, list[int]] = {}  # extent id -> places in `blocks`
        self._bounce: dict[int, bytearray] = {}  # place -> its segment of the present layer
        self._readers: dict[int, ExtentReader] = {}
        for place, block in enumerate(blocks):
            if block.extent is not None:
                self._by_extent.setdefault(block.extent[0], []).append(place)
                if block.slot is not None:
                    slab.unseal(block.slot)
        self._num_disk = sum(len(places) for places in self._by_extent.values())
        self.disk_share = self._num_disk / len(blocks)

    def __enter__(self) -> "LayerSource":
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    def read(self, layer: int, failed: dict[BlockKey, str]) -> None:
        """Bring one layer and check it. Notes in `failed` blocks whose bytes in DRAM are not what they were. Raises
        BlockMissing for those on disk."""
        self.read_disk(layer)
        for block in self._blocks:
            if block.extent is None and not self._slab.is_intact(layer, block.slot or 0):
                failed[block.key] = "checksum"

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K un-rotated and V of the layer that was read last [tokens of all blocks, kv_heads, dim]; copies."""
        slab = self._slab
        slots = torch.tensor([block.slot if block.slot is not None else 0 for block in self._blocks])
        k, v = slab.k(layer).index_select(0, slots), slab.v(layer).index_select(0, slots)
        for place, data in self._bounce.items():
            elements = torch.frombuffer(data, dtype=slab.dtype)
            split = k[place].numel()
            k[place] = elements[:split].view(k.shape[1:])
            v[place] = elements[split:].view(v.shape[1:])
        if all(block.num_rows == k.shape[1] for block in self._blocks):
            return k.flatten(0, 1), v.flatten(0, 1)
        parts_k, parts_v = [], []
        for place, block in enumerate(self._blocks):
            parts_k.append(k[place, : block.num_rows])
            parts_v.append(v[place, : block.num_rows])
        return torch.cat(parts_k), torch.cat(parts_v)

    def read_disk(self, layer: int) -> None:
        """Bring one layer of the blocks that are on disk. Raises BlockMissing."""
        for extent_id, places in self._by_extent.items():
            reader = self._readers.get(extent_id)
            if reader is None:
                assert self._disk is not None
                reader = self._readers[extent_id] = self._disk.reader(extent_id)
            outs = []
            for place in places:
                slot = self._blocks[place].slot
                if slot is not None:
                    outs.append(self._slab.segment(layer, slot))
                else:
                    self._bounce[place] = bytearray(self._slab.segment_bytes[layer])
                    outs.append(memoryview(self._bounce[place]))
            indices = [extent[1] for place in places if (extent := self._blocks[place].extent) is not None]
            reader.read(layer, indices, outs)

    def seal_passed(self) -> None:
        """Blocks that came from disk into slots are complete there."""
        for block in self._blocks:
            if block.extent is not None and block.slot is not None:
                self._slab.seal(block.slot)

    def dram_bytes(self, layer: int) -> int:
        return (len(self._blocks) - self._num_disk) * self._slab.segment_bytes[layer]

    def total_bytes(self) -> dict[str, int]:
        """By direction."""
        dram, disk = len(self._blocks) - self._num_disk, self._num_disk
        sizes = {"dram_to_hbm": dram * self._slab.slot_bytes, "disk_to_hbm": disk * self._slab.slot_bytes}
        return {direction: size for direction, size in sizes.items() if size}
