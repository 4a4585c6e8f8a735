"""The byte work of a load: one layer of its blocks out of slots and buffers into pages."""

from collections.abc import Sequence

import torch

from cache.plan import BlockLoad
from cache.tiers.layer_source import LayerSource
from cache.tiers.rotations import Rotations
from kernels.attention.base import KvPages
from kernels.kv_copy import write_rows


class Loader:
    """For one load. On the loading thread, which has no team of workers: see `cache.transfer`."""

    def __init__(self, *, blocks: Sequence[BlockLoad], pages: Sequence[KvPages], rotations: Rotations) -> None:
        self._pages, self._rotations = pages, rotations
        device, page_size = pages[0].k.device, pages[0].k.shape[1]
        numbers = [torch.arange(block.num_rows) for block in blocks]
        slots = [n + (b.page * page_size + b.page_row) for n, b in zip(numbers, blocks, strict=True)]
        positions = [n + b.position for n, b in zip(numbers, blocks, strict=True)]
        self._device = device
        self._slots, self._positions = torch.cat(slots).to(device), torch.cat(positions).to(device)

    def place(self, layer: int, source: LayerSource) -> None:
        """Write the layer that `source` has brought and checked, its keys rotated; done on return, or on CUDA when the
        current stream is."""
        k, v = source.rows(layer)
        k, v = k.to(self._device, non_blocking=True), v.to(self._device, non_blocking=True)
        pages = self._pages[layer]
        write_rows(pages.k, self._slots, self._rotations.rotate(layer, k, self._positions))
        write_rows(pages.v, self._slots, v)
