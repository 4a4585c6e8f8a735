"""Blocks at rest, keys without position, into the pages of one layer: the compiled way, where there is one."""

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
    """`kernels.cpu.load`, or None where it cannot run: no numba, or no AVX2, so that torch rounds otherwise. The first
    call compiles."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx2_supported():
        return None
    try:
        has_team = decode_kernels() is not None  # before numba chooses whose threads it uses
        announce_compiling()
        module = importlib.import_module("kernels.cpu.load")
        module.self_test(has_team)
    except Exception as error:  # a numba that does not fit its numpy or its machine fails in many ways
        log.info("loading without compiled kernels: %s", error)
        return None
    return module


class BlockWriter:
    """One layer's pool, bf16 on CPU. Any thread, as long as nobody else writes to the same pages; lets go of the GIL.
    `block_writer` makes it."""

    def __init__(self, kernels: ModuleType, pages: KvPages, block_rows: int) -> None:
        k, v = pages.k, pages.v
        self._kernels = kernels
        self.has_team = decode_kernels() is not None  # whether `write` can do it together
        self._num_pages = len(k)
        self._block_rows = block_rows
        # Streams and strides are made once: this is called for every layer of every load.
        self._pool = (as_stream(k), k.stride()[:3], as_stream(v), v.stride()[:3], k.shape[1])
        self._shape = (k.shape[2], k.shape[3], v.shape[3])
        self._segment = block_rows * k.shape[2] * (k.shape[3] + v.shape[3])

    def write(
        self, segments: Tensor, blocks: np.ndarray, sums: np.ndarray, cos: Tensor, sin: Tensor, *, together: bool
    ) -> np.ndarray:
        """segments bf16 [...], contiguous: blocks of keys without position [block_rows, kv_heads, k_dim] and behind
        them values [block_rows, kv_heads, v_dim]; blocks int64 [blocks, 4]: the element that a block begins with, how
        many of its rows to write, the slot (page * page_size + row) of the first, in whose page is room for all, and
        the row of the tables that belongs to it; cos, sin bf16 [rows, R], contiguous: dims i and i + R / 2 turn
        together, those behind R are copied. Bit for bit what torch's rotation in bf16 and `write_rows` leave.
        together: with torch's team, which is the computing thread's; only if `has_team`. sums: uint64 [blocks], the
        xxh3_64 of every block's segment. Returns bool [blocks]: those that were not written because it is another.
        Raises ValueError on what lies outside of segments, pool or tables, and RuntimeError on what is not contiguous.
        """
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
    """None where the compiled way cannot be gone."""
    if any(x.dtype != torch.bfloat16 or x.is_cuda or x.stride(-1) != 1 for x in (pages.k, pages.v)):
        return None
    kernels = load_kernels()
    block_bytes = 2 * block_rows * pages.k.shape[2] * (pages.k.shape[3] + pages.v.shape[3])
    if kernels is None or block_bytes < kernels.MIN_BYTES:
        return None
    return BlockWriter(kernels, pages, block_rows)
