"""Provides the small operations of a bf16 decoder layer over many rows, compiled by numba: rotation combined with
writing keys and values to their slots, and merging two parts of an attention. Each takes one pass over memory.

Every row is computed by one thread and in one order, so results do not depend on other rows or on the number of
threads. bf16 is widened in registers and rounded once, to nearest and ties to even; NaN stays NaN.

Measured on one core, us with torch -> compiled: rotating 1,124 rows of 12 + 4 + 4 heads of 64 1,300 -> 460.

Import this through `reprise.kernels.cpu.available.prefill_kernels`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types

from reprise.kernels.cpu.emit import compiled, intrinsic
from reprise.kernels.cpu.packed_heads import pack_head
from reprise.kernels.views import Bf16, Fp32, Int64

_F32, _I32 = ir.FloatType(), ir.IntType(32)


@intrinsic
def _widened(_: Any, x: types.Type) -> Any:
    """Convert bf16 as uint16 to float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(types.uint16), generate


@intrinsic
def _rounded(_: Any, x: types.Type) -> Any:
    """Convert float32 to bf16 as uint16, without a branch, so that loops around it are vectorised."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), ir.IntType(16))

    return types.uint16(types.float32), generate


@compiled()
def _rotate(x: Bf16, cos: Bf16, sin: Bf16, out: Bf16) -> None:
    """Rotate exactly as torch does in bf16, bit for bit, because keys rotated after loading must be the same."""
    half = len(cos) // 2
    for d in range(half):
        low, high = _widened(x[d]), _widened(x[half + d])
        a, b = _widened(_rounded(low * _widened(cos[d]))), _widened(_rounded(high * _widened(cos[half + d])))
        out[d] = _rounded(a - high * _widened(sin[d]))
        out[half + d] = _rounded(b + low * _widened(sin[half + d]))


@compiled(parallel=True, error_model="numpy")
def place(
    turning: Bf16,
    turning_row: int,
    values: Bf16,
    values_row: int,
    cos: Bf16,
    sin: Bf16,
    slots: Int64,
    blocks: Bf16,
    spots: Int64,
    heads: tuple[int, int],
    k: Bf16,
    k_strides: tuple[int, int, int],
    v: Bf16,
    v_strides: tuple[int, int, int],
    page_size: int,
    is_packed: bool,
    q: Bf16,
) -> None:
    """Rotate queries and keys, write keys and values to their slots, and save un-rotated keys and values.

    turning: the heads to be rotated, each row having its query heads and then its key heads. values: rows of kv heads.
    Both are bf16 memory as flat arrays, with turning_row and values_row elements from row to row. cos, sin bf16 [rows,
    dim]. slots int64 [rows], all different and inside the pool. blocks bf16 [blocks, elements]: where rows are saved,
    the keys of all rows of a block and then their values. spots int64 [rows, 2]: (block in which a row is saved, row in
    it); block -1: not saved. Without rows none is saved. heads: (query heads, kv heads). k, v: a pool's bf16 memory as
    flat arrays, and strides (page, row, head) in elements. is_packed: the pool's rows are as in
    `reprise.kernels.cpu.packed_heads`, two bytes to each element. q bf16 [rows, heads, dim]: receives the rotated
    queries.
    """
    dim = cos.shape[1]
    num_q, num_k = heads
    for row in prange(len(slots)):
        at = row * turning_row
        for head in range(num_q):
            _rotate(turning[at : at + dim], cos[row], sin[row], q[row, head])
            at += dim
        page, place = slots[row] // page_size, slots[row] % page_size
        for head in range(num_k):
            to = page * k_strides[0] + place * k_strides[1] + head * k_strides[2]
            if is_packed:
                turned = np.empty(dim, np.uint16)
                _rotate(turning[at : at + dim], cos[row], sin[row], turned)
                pack_head(turned, k.ctypes.data + 2 * to)
            else:
                _rotate(turning[at : at + dim], cos[row], sin[row], k[to : to + dim])
            at += dim
        at = row * values_row
        for head in range(num_k):
            to = page * v_strides[0] + place * v_strides[1] + head * v_strides[2]
            if is_packed:
                pack_head(values[at : at + dim], v.ctypes.data + 2 * to)
            else:
                v[to : to + dim] = values[at : at + dim]
            at += dim
        if len(spots) and spots[row, 0] >= 0:
            width = num_k * dim
            to, of_keys = spots[row, 1] * width, row * turning_row + num_q * dim
            block = blocks[spots[row, 0]]
            block[to : to + width] = turning[of_keys : of_keys + width]
            to += blocks.shape[1] // 2
            block[to : to + width] = values[row * values_row : row * values_row + width]


@compiled(parallel=True, error_model="numpy")
def merge(
    own: Bf16,
    own_strides: tuple[int, int, int],
    own_lse: Fp32,
    own_lse_strides: tuple[int, int, int],
    old: Bf16,
    old_strides: tuple[int, int, int],
    old_lse: Fp32,
    old_lse_strides: tuple[int, int, int],
    out: Bf16,
) -> None:
    """Merge the attention of rows to the keys of their own chunk (own) and to earlier keys (old), weighted by their
    log-sum-exps. own, old bf16 and own_lse, old_lse fp32: memory as flat arrays, and strides (kv head, group, row) in
    elements; out bf16 [rows, kv heads, groups, dim]."""
    rows, kv_heads, groups, dim = out.shape
    for row in prange(rows):
        for head in range(kv_heads):
            for group in range(groups):
                lse = own_lse[head * own_lse_strides[0] + group * own_lse_strides[1] + row * own_lse_strides[2]]
                more = old_lse[head * old_lse_strides[0] + group * old_lse_strides[1] + row * old_lse_strides[2]]
                share = np.float32(1.0) / (np.float32(1.0) + np.exp(lse - more))
                rest = np.float32(1.0) / (np.float32(1.0) + np.exp(more - lse))
                at = head * own_strides[0] + group * own_strides[1] + row * own_strides[2]
                mine = own[at : at + dim]
                at = head * old_strides[0] + group * old_strides[1] + row * old_strides[2]
                theirs = old[at : at + dim]
                target = out[row, head, group]
                for d in range(dim):
                    target[d] = _rounded(_widened(mine[d]) * rest + _widened(theirs[d]) * share)


def self_test() -> None:
    """Compile everything with the types of later calls, and check the results. Raises an error if anything is wrong."""
    rows, dim = 3, 32
    one, two = np.uint16(0x3F80), np.uint16(0x4000)  # 1.0 and 2.0
    x = np.full((rows, dim), two)
    turning, queries, pool = (
        np.full(rows * 2 * dim, two),
        np.zeros((rows, 1, dim), np.uint16),
        np.zeros(rows * dim, np.uint16),
    )
    more, strides, cos, sin = pool.copy(), (rows * dim, dim, rows * dim), np.full_like(x, one), np.zeros_like(x)
    values, slots = x.reshape(-1), np.arange(rows)
    blocks, spots = np.zeros((2, 2 * dim), np.uint16), np.array([[-1, 0], [1, 0], [-1, 0]])
    where = (blocks, spots, (1, 1), pool, strides, more, strides, rows, False, queries)
    place(turning, 2 * dim, values, dim, cos, sin, slots, *where)
    mixed, lse = np.zeros((rows, 1, 1, dim), np.uint16), np.ones(rows, np.float32)
    merge(values, (0, 0, dim), lse, (0, 0, 1), values, (0, 0, dim), lse, (0, 0, 1), mixed)
    if any((y != two).any() for y in (queries, pool, more, blocks[1], mixed)) or blocks[0].any():
        raise RuntimeError("compiled operations of many rows are wrong")
