"""Copies a load's blocks into pages, layer by layer and checked, from DRAM slots or from memory that was read into."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.storage.slab import Slab
from reprise.cache.transfer.key_rotations import KeyRotations
from reprise.cache.transfer.layer_source import LayerSource, brought
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.block_writer import BlockWriter, block_writer
from reprise.kernels.kv_copy import write_rows


class PagePool:
    """The pages of all layers, with the compiled functions that write into them, where there are any. Made once, before
    the threads begin, because it may compile."""

    def __init__(self, pages: Sequence[KvPages]) -> None:
        self.pages = pages
        self.device, self.page_size = pages[0].k.device, pages[0].k.shape[1]
        self.writers: list[BlockWriter | None] = [block_writer(layer, BLOCK_TOKENS) for layer in pages]
        self.has_team = all(writer is not None and writer.has_team for writer in self.writers)

    def compile_for(self, slab: Slab, rotations: KeyRotations) -> None:
        """Compile now what CUDA would compile at its first call, so that no request waits for it. Writes no row."""
        nothing = np.zeros((1, 4), np.int64)
        for layer, writer in enumerate(self.writers):
            tables = rotations.halves(layer, 1, self.device) if writer is not None else None
            if writer is not None and tables is not None:
                writer.write(slab.segments(layer), nothing, np.zeros(0, np.uint64), *tables, together=False)


class Loader:
    """A part that writes one load, or a part of one, into pages, for a LoadPlacer or a SlotReader. Used by one thread
    at a time."""

    def __init__(self, *, source: LayerSource, pool: PagePool) -> None:
        self._source, self._pool = source, pool
        blocks = source.blocks
        self._keys = [block.key for block in blocks]
        self._num_rows = [block.num_rows for block in blocks]
        self._stop = max(block.position + block.num_rows for block in blocks)
        # As `BlockWriter` wants them: (start in memory, rows, row in the pool, position). The start changes by layer.
        self._numbers = np.array(
            [(0, b.num_rows, b.page * pool.page_size + b.page_row, b.position) for b in blocks], dtype=np.int64
        )
        self._rows: tuple[Tensor, Tensor] | None = None

    def place(self, layer: int, failed: dict[BlockKey, str], rotations: KeyRotations, *, together: bool) -> None:
        """Write one layer of the source's blocks into pages, with its keys rotated. The layer is in place on return, or
        on CUDA when the current stream is done. Altered blocks are added to `failed`; they are not written, or on CUDA
        written as they are. rotations: the calling thread's. together: whether to use torch's team of threads, which
        only the thread that computes has (`reprise.cache.transfer.transfer`)."""
        writer = self._pool.writers[layer]
        tables = rotations.halves(layer, self._stop, self._pool.device) if writer is not None else None
        if writer is None or tables is None:
            segments = brought(*self._source.segments(layer), self._pool.device)  # copied while they are compared
            failed.update(dict.fromkeys(self._source.altered(layer), "checksum"))
            if not failed:
                self._place_by_torch(layer, segments, rotations)
            return
        memory, chosen = self._source.segments(layer)
        np.multiply(chosen.numpy(), memory.stride(0), out=self._numbers[:, 0])
        sums = self._source.sums(layer)
        wrong = writer.write(memory, self._numbers, sums, *tables, together=together)
        if wrong.any():
            failed.update((self._keys[place], "checksum") for place in np.flatnonzero(wrong).tolist())

    def _place_by_torch(self, layer: int, segments: Tensor, rotations: KeyRotations) -> None:
        """Write a layer with torch alone. segments: the blocks' rows of this layer, on the pages' device."""
        pages = self._pool.pages[layer]
        heads, k_dim = pages.k.shape[2], pages.k_dim
        split = BLOCK_TOKENS * heads * k_dim
        k = self._wanted(segments[:, :split].view(len(segments), BLOCK_TOKENS, heads, k_dim))
        v = self._wanted(segments[:, split:].view(len(segments), BLOCK_TOKENS, heads, -1))
        slots, positions = self._slots_and_positions()
        write_rows(pages.k, slots, pages.to_rows(rotations.rotate(layer, k, positions)))
        write_rows(pages.v, slots, pages.to_rows(v))

    def _wanted(self, rows: Tensor) -> Tensor:
        """Return the rows of all blocks that are to be loaded: [blocks, 32, ...] -> [rows, ...]."""
        if all(count == BLOCK_TOKENS for count in self._num_rows):
            return rows.flatten(0, 1)
        return torch.cat([block[:count] for block, count in zip(rows, self._num_rows, strict=True)])

    def _slots_and_positions(self) -> tuple[Tensor, Tensor]:
        """Return the index in the pool and the position of every row that is to be loaded: the same tensors for all
        layers, so that `KeyRotations` recognises them."""
        if self._rows is None:
            _, counts, slots, positions = self._numbers.T
            within = np.concatenate([np.arange(count) for count in counts])
            both = (torch.from_numpy(np.repeat(first, counts) + within) for first in (slots, positions))
            self._rows = next(both).to(self._pool.device), next(both).to(self._pool.device)
        return self._rows
