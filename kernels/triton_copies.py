"""Copies KV between CUDA's pages and page-locked memory of the host by Triton kernels. Importing it needs Triton.

A copy engine needs pieces of a megabyte to use its link: it reaches 46.8 GB/s to an H100 with them, 12.1 with pieces of
128 KiB (a layer of a block of an 8 B model), and 5.8 with 64 KiB. For a kernel that reads and writes the host's memory
by itself, the places of the pieces do not matter, and it rotates keys and finds their pages on the way. It uses only a
few of the device's processors, so that the computation beside it keeps the others.

With TRITON_INTERPRET=1 in the environment before the import, the kernels run on CPU tensors in Triton's interpreter.
That proves indexing and arithmetic, but neither compilation nor speed. Tests of the compiled kernels carry the `gpu`
mark.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from reprise.kernels.triton_rows import turned

# Across the link 16 programs of four warps do 48.4 GB/s on an H100, and 64 do 49.0. What is computed meanwhile pays for
# every one of them: 80 products that read weights at 8 rows take 1.50 ms alone, 1.96 beside 16, 2.68 beside 32 and 3.95
# beside 64.
_PROGRAMS = 16
_PROGRAMS_IN_HBM = 64  # programs where rows come out of HBM, which is faster the more programs ask
_LINES = 64  # heads of rows that a program copies at once
_TILE_WORDS = 2048  # words of eight bytes that a program copies at once
ALIGNMENT = 16  # bytes: what one thread loads at once
START_ELEMENTS = 16  # blocks begin at multiples of these, so that the compiler knows of `ALIGNMENT`


@triton.jit(do_not_specialize=["num_items"])  # type: ignore[untyped-decorator]
def _write_blocks(
    source_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    num_items: tl.tensor,
    k_page: tl.tensor,  # strides in elements: page, row of a page, head
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    page_size: tl.tensor,
    block_rows: tl.constexpr,
    heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    half: tl.constexpr,
    lines: tl.constexpr,
    half_padded: tl.constexpr,
    rest_padded: tl.constexpr,
    v_padded: tl.constexpr,
) -> None:
    """Write blocks into a layer's pages. A line is one head of one row; an item is `lines` lines of a block. The source
    is an argument of its own rather than an address in the table, because Triton does not know a number that is cast to
    a pointer to be aligned."""
    items_per_block: tl.constexpr = (block_rows * heads + lines - 1) // lines
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = blocks_ptr + item // items_per_block * 4
        start = tl.multiple_of(tl.load(block), 16)
        count = tl.load(block + 1)
        slot = tl.load(block + 2)
        angle = tl.load(block + 3)
        line = item % items_per_block * lines + tl.arange(0, lines)
        row = line // heads
        head = line % heads
        is_live = row < count
        k_from = source_ptr + start + line * k_dim
        k_to = k_pool_ptr + slot // page_size * k_page + (slot % page_size + row) * k_row + head * k_head
        if half > 0:
            dim = tl.arange(0, half_padded)
            mask = is_live[:, None] & (dim < half)[None, :]
            low = tl.load(k_from[:, None] + dim[None, :], mask=mask).to(tl.float32)
            high = tl.load(k_from[:, None] + half + dim[None, :], mask=mask).to(tl.float32)
            turn = (angle + row)[:, None] * (2 * half) + dim[None, :]
            low_cos = tl.load(cos_ptr + turn, mask=mask).to(tl.float32)
            high_cos = tl.load(cos_ptr + turn + half, mask=mask).to(tl.float32)
            low_sin = tl.load(sin_ptr + turn, mask=mask).to(tl.float32)
            high_sin = tl.load(sin_ptr + turn + half, mask=mask).to(tl.float32)
            first, second = turned(low, high, low_cos, high_cos, low_sin, high_sin, k_pool_ptr.dtype.element_ty)
            tl.store(k_to[:, None] + dim[None, :], first, mask=mask)
            tl.store(k_to[:, None] + half + dim[None, :], second, mask=mask)
        if 2 * half < k_dim:
            rest = 2 * half + tl.arange(0, rest_padded)
            mask = is_live[:, None] & (rest < k_dim)[None, :]
            tl.store(k_to[:, None] + rest[None, :], tl.load(k_from[:, None] + rest[None, :], mask=mask), mask=mask)
        v_from = source_ptr + start + block_rows * heads * k_dim + line * v_dim
        v_to = v_pool_ptr + slot // page_size * v_page + (slot % page_size + row) * v_row + head * v_head
        dim = tl.arange(0, v_padded)
        mask = is_live[:, None] & (dim < v_dim)[None, :]
        tl.store(v_to[:, None] + dim[None, :], tl.load(v_from[:, None] + dim[None, :], mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_copies"])  # type: ignore[untyped-decorator]
def _copy_rows(copies_ptr: tl.tensor, num_copies: tl.tensor, rows_tile: tl.constexpr, words: tl.constexpr) -> None:
    """Copy rows to contiguous memory. copies_ptr: num_copies rows of five int64, as in `copy_rows`: source address,
    bytes from row to row, target address, rows, bytes per row. rows_tile: rows that are copied at once. words: of 8
    bytes, at least as many as a row has."""
    for number in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        copy = copies_ptr + number * 5
        source = tl.multiple_of(tl.load(copy), 16)
        step = tl.multiple_of(tl.load(copy + 1), 16)
        target = tl.multiple_of(tl.load(copy + 2), 16)
        count = tl.load(copy + 3)
        size = tl.multiple_of(tl.load(copy + 4), 16)
        word = tl.arange(0, words)
        for first in range(0, count, rows_tile):
            row = first + tl.arange(0, rows_tile)
            mask = (row < count)[:, None] & (word * 8 < size)[None, :]
            read = (source + row * step).to(tl.pointer_type(tl.int64))
            write = (target + row * size).to(tl.pointer_type(tl.int64))
            tl.store(write[:, None] + word[None, :], tl.load(read[:, None] + word[None, :], mask=mask), mask=mask)


def write_blocks(
    segments: Tensor, blocks: Tensor, cos: Tensor, sin: Tensor, k_pool: Tensor, v_pool: Tensor, block_rows: int
) -> None:
    """Write blocks of one layer into its pages, rotating their keys; asynchronous, on the current stream.

    segments: contiguous, of the pools' dtype, on their device or page-locked; blocks int64 [blocks, 4] on the pools'
    device, as `reprise.kernels.block_writer.BlockWriter.write` takes and checks them; cos, sin: contiguous, of the
    pools' dtype, [positions, R] on their device. Each head of the pools is dense."""
    heads, k_dim = k_pool.shape[2:]
    v_dim, half = v_pool.shape[3], cos.shape[1] // 2
    num_items = len(blocks) * triton.cdiv(block_rows * heads, _LINES)
    programs = _PROGRAMS if segments.device.type == "cpu" else _PROGRAMS_IN_HBM
    if not num_items:
        return
    _write_blocks[(min(num_items, programs),)](
        segments,
        blocks,
        cos,
        sin,
        k_pool,
        v_pool,
        num_items,
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        k_pool.shape[1],
        block_rows=block_rows,
        heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        half=half,
        lines=_LINES,
        half_padded=triton.next_power_of_2(max(half, 1)),
        rest_padded=triton.next_power_of_2(max(k_dim - 2 * half, 1)),
        v_padded=triton.next_power_of_2(v_dim),
    )


def copy_rows(copies: NDArray[np.int64], device: torch.device) -> None:
    """Copy rows to contiguous memory; asynchronous, on the current stream. copies int64 [n, 5]: address of the first
    row, bytes from one row to the next, target address, number of rows, bytes per row; all but the count multiples of
    `ALIGNMENT`. Addresses are of the device's memory or of page-locked memory."""
    if not len(copies):
        return
    words = triton.next_power_of_2(int(copies[:, 4].max()) // 8)
    _copy_rows[(min(len(copies), _PROGRAMS),)](
        torch.from_numpy(copies).to(device), len(copies), rows_tile=max(1, _TILE_WORDS // words), words=words
    )
