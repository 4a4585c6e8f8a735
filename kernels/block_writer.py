"""Writes stored blocks, with un-rotated keys, into the pages of one layer by compiled kernels, where available."""

import functools
import importlib
import logging
import platform
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from kernels.attention.ragged_batch import KvPages
from kernels.cpu.available import announce_compiling, decode_kernels, use_torch_threads
from kernels.views import as_bits, as_stream

log = logging.getLogger(__name__)


@functools.cache
def load_kernels() -> ModuleType | None:
    """Return `kernels.cpu.load`, or None if it cannot run: without numba, or without AVX2, where torch rounds
    differently. The first call compiles."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx2_supported():
        return None
    try:
        has_team = decode_kernels() is not None  # must come before numba chooses its threading layer
        announce_compiling()
        module = importlib.import_module("kernels.cpu.load")
        module.self_test(has_team)
    except Exception as error:  # a numba that does not fit its numpy or its machine can fail in many ways
        log.info("loading without compiled kernels: %s", error)
        return None
    return module


class BlockWriter:
    """Writes into one layer's pool, bf16 on CPU. Any thread may use it, as long as no other writes to the same pages.
    Releases the GIL. Made by `block_writer`."""

    def __init__(self, kernels: ModuleType, pages: KvPages, block_rows: int) -> None:
        k, v = pages.k, pages.v
        self._kernels = kernels
        self.has_team = decode_kernels() is not None  # whether `write` can use torch's team of threads
        self._num_pages = len(k)
        self._block_rows = block_rows
        # Streams and strides are made once, because every layer of every load calls `write`.
        self._pool = (as_stream(k), k.stride()[:3], as_stream(v), v.stride()[:3], k.shape[1])
        self._shape = (k.shape[2], k.shape[3], v.shape[3])
        self._segment = block_rows * k.shape[2] * (k.shape[3] + v.shape[3])

    def write(
        self, segments: Tensor, blocks: np.ndarray, sums: np.ndarray, cos: Tensor, sin: Tensor, *, together: bool
    ) -> np.ndarray:
        """Write blocks into pages, rotating their keys.
        segments: contiguous bf16 [...], containing blocks of un-rotated keys [block_rows, kv_heads, k_dim], each
        followed by its values [block_rows, kv_heads, v_dim]. blocks: int64 [blocks, 4]: the element where a block
        begins, the number of its rows to write, the slot (page * page_size + row) of the first row, whose page must
        hold them all, and the block's row in the tables. sums: uint64 [blocks], the xxh3_64 of each block's segment, or
        [0] where that was compared. cos, sin: contiguous bf16 [rows, R]; dims i and i + R / 2 turn together, dims from
        R on are copied. together: use torch's team of threads, which must belong to the calling thread; only if
        `has_team`.
        The result equals torch's rotation in bf16 followed by `write_rows`, bit for bit. Returns bool [blocks]: True
        for blocks that were not written because their checksum differs. Raises ValueError for anything outside of
        segments, pool or tables, and RuntimeError for tensors that are not contiguous."""
        starts, counts, slots, angles = blocks.T
        page_size = self._pool[4]
        if len(blocks) and (
            blocks.min() < 0
            or starts.max() + self._segment > segments.numel()
            or counts.max() > self._block_rows
            or (slots % page_size + counts).max() > page_size
            or slots.max() // page_size >= self._num_pages
            or (angles + counts).max() > len(cos)
        ):
            raise ValueError("blocks outside of their segments, pages or tables")
        wrong = np.zeros(len(blocks), np.bool_)
        if together:
            use_torch_threads()
        place = self._kernels.place_together if together else self._kernels.place
        place(
            as_bits(segments.view(-1)),
            blocks,
            sums,
            wrong,
            self._block_rows,
            as_bits(cos.view(-1)),
            as_bits(sin.view(-1)),
            cos.shape[1],
            *self._pool,
            self._shape,
        )
        return wrong


def block_writer(pages: KvPages, block_rows: int) -> BlockWriter | None:
    """Return a writer for this pool, or None if the compiled kernels cannot be used."""
    if any(x.dtype != torch.bfloat16 or x.is_cuda or x.stride(-1) != 1 for x in (pages.k, pages.v)):
        return None
    kernels = load_kernels()
    block_bytes = 2 * block_rows * pages.k.shape[2] * (pages.k.shape[3] + pages.v.shape[3])
    if kernels is None or block_bytes < kernels.MIN_BYTES:
        return None
    return BlockWriter(kernels, pages, block_rows)
