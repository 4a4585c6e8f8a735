"""Writes stored blocks, with un-rotated keys, into the pages of one layer by compiled kernels, where available."""

from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.checksums import checksums
from reprise.kernels.cpu.available import decode_kernels, load_kernels, use_torch_threads
from reprise.kernels.triton_kernels import triton_copies
from reprise.kernels.views import as_bf16, as_bits, as_stream


class BlockWriter(Protocol):
    """A writer of stored blocks into the pages of one layer, which hold bf16 or are packed as int8 with scales. Any
    thread may use it, if no other writes to the same pages. Releases the GIL. Made by `block_writer`."""

    has_team: bool
    """Whether `write` can use torch's team of threads."""

    def write(
        self, segments: Tensor, blocks: np.ndarray, sums: np.ndarray, cos: Tensor, sin: Tensor, *, together: bool
    ) -> np.ndarray:
        """Write blocks into pages, rotating their keys. The result equals torch's rotation in bf16 followed by
        `write_rows`, bit for bit. On CUDA it is there when the current stream is.

        segments: contiguous bf16 [segments, elements] on the CPU; also on the pool's device if `sums` is empty. A
        segment has a block's un-rotated keys [block_rows, kv_heads, k_dim], followed by its values [block_rows,
        kv_heads, v_dim]. blocks: int64 [blocks, 4]: the element of `segments` where a block begins; the number of its
        rows to write; the slot (page * page_size + row) of its first row, whose page must hold them all; the block's
        row in cos and sin. sums: uint64 [blocks], the xxh3_64 of each block's segment; or of size 0 if no checksum is
        to be compared. cos, sin: contiguous bf16 [rows, R] on the pool's device. Dims i and i + R / 2 turn together;
        dims from R on are copied. together: use torch's team of threads, which must belong to the calling thread; only
        if `has_team`.

        Returns bool [blocks]: True for blocks whose checksum differs. On the CPU they are not written; on CUDA they may
        have been written. Raises ValueError for anything outside of segments, pool or tables, and RuntimeError for
        tensors that are not contiguous.
        """
        ...


class _CpuWriter:
    """A BlockWriter on CPU, which compares, rotates and writes in one pass over memory."""

    def __init__(self, kernels: ModuleType, pages: KvPages, block_rows: int) -> None:
        k, v = as_bf16(pages.k), as_bf16(pages.v)
        self._kernels = kernels
        self.has_team = decode_kernels() is not None
        self._num_pages = len(k)
        self._block_rows = block_rows
        # Streams and strides are made once, because every layer of every load calls `write`.
        self._pool = (as_stream(k), k.stride()[:3], as_stream(v), v.stride()[:3], k.shape[1])
        self._shape, self._is_packed = (k.shape[2], pages.k_dim, pages.v_dim), pages.is_packed
        self._segment = block_rows * k.shape[2] * (pages.k_dim + pages.v_dim)

    def write(
        self, segments: Tensor, blocks: np.ndarray, sums: np.ndarray, cos: Tensor, sin: Tensor, *, together: bool
    ) -> np.ndarray:
        """Write blocks, as `BlockWriter.write` demands."""
        _check(blocks, segments, cos, self._block_rows, self._pool[4], self._num_pages, self._segment)
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
            self._is_packed,
        )
        return wrong


class _CudaWriter:
    """A BlockWriter on CUDA, which compares checksums on the processors while the device reads the segments from
    page-locked memory."""

    has_team = False

    def __init__(self, kernels: ModuleType, pages: KvPages, block_rows: int) -> None:
        self._kernels, self._pages, self._block_rows = kernels, pages, block_rows
        (num_pages, page_size, heads, k_dim), v_dim = pages.k.shape, pages.v.shape[3]
        self._bounds = block_rows, page_size, num_pages, block_rows * heads * (k_dim + v_dim)

    def write(
        self, segments: Tensor, blocks: np.ndarray, sums: np.ndarray, cos: Tensor, sin: Tensor, *, together: bool
    ) -> np.ndarray:
        """Write blocks, as `BlockWriter.write` demands."""
        _check(blocks, segments, cos, *self._bounds)
        if (blocks[:, 0] % self._kernels.START_ELEMENTS).any():
            raise ValueError(f"blocks that do not begin at a multiple of {self._kernels.START_ELEMENTS} elements")
        if not len(blocks):
            return np.zeros(0, np.bool_)
        chosen = blocks[:, 0] // segments.stride(0)
        memory, numbers, device = segments, torch.from_numpy(blocks), self._pages.k.device
        if segments.device != device and not segments.is_pinned():
            memory = segments.index_select(0, torch.from_numpy(chosen)).to(device)
            numbers = numbers.clone()
            numbers[:, 0] = torch.arange(len(blocks)) * memory.stride(0)
        pools = self._pages.k, self._pages.v
        self._kernels.write_blocks(memory, numbers.to(device), cos, sin, *pools, self._block_rows)
        if not len(sums):  # rows that were made on the device, or compared before
            return np.zeros(len(blocks), np.bool_)
        stream = segments.view(-1).view(torch.uint8).numpy()
        differs: np.ndarray = checksums(stream, segments.stride(0) * segments.element_size(), chosen) != sums
        return differs


def _check(
    blocks: np.ndarray, segments: Tensor, cos: Tensor, block_rows: int, page_size: int, num_pages: int, elements: int
) -> None:
    """Raise ValueError for blocks outside of the memory from which they are read or to which they are written.
    elements: of a segment."""
    starts, counts, slots, angles = blocks.T
    if len(blocks) and (
        blocks.min() < 0
        or starts.max() + elements > segments.numel()
        or counts.max() > block_rows
        or (slots % page_size + counts).max() > page_size
        or slots.max() // page_size >= num_pages
        or (angles + counts).max() > len(cos)
    ):
        raise ValueError("blocks outside of their segments, pages or tables")


def block_writer(pages: KvPages, block_rows: int) -> BlockWriter | None:
    """Return a writer of blocks of `block_rows` rows into these pages, or None if the compiled kernels cannot be
    used."""
    if not pages.has_kernels or any(x.stride(-1) != 1 for x in (pages.k, pages.v)):
        return None
    if pages.k.is_cuda:
        triton = triton_copies()
        return None if triton is None else _CudaWriter(triton, pages, block_rows)
    kernels = load_kernels()
    block_bytes = 2 * block_rows * pages.k.shape[2] * (pages.k_dim + pages.v_dim)
    if kernels is None or block_bytes < kernels.MIN_BYTES:
        return None
    return _CpuWriter(kernels, pages, block_rows)
