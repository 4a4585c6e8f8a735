"""Provides kernels for decoding in bf16 on CPU, compiled by numba. A decode step computes most layers in runs, several
layers in one call of `reprise.kernels.cpu.layers`; these kernels are for the rest of it. Prefill uses some of them too.

Import this through `reprise.kernels.cpu.available.decode_kernels`.
"""

import numpy as np
from numba import prange, threading_layer

from reprise.kernels.cpu.attend import AttentionTasks, Pool, attend_part, merge_parts, plan
from reprise.kernels.cpu.blocks import (
    E2M1,
    FIRST,
    INPUTS,
    OUTPUTS,
    PLAIN,
    PRODUCT_FIELDS,
    SIZE,
    WITH_LOWS,
    packed_kernel,
    words_kernel,
)
from reprise.kernels.cpu.emit import LANES, LOG2_E, compiled, rounded, widened
from reprise.kernels.cpu.layer_fields import LAYER_FIELDS, Shape
from reprise.kernels.cpu.layers import ATTEND, COMPLETE, PROJECT, TURN, Rows, run
from reprise.kernels.cpu.multiply import (
    Inputs,
    blocks_of,
    gate_in_place,
    make_inputs,
    multiply_block,
    place_at,
    scratch_size,
    set_row,
    unpack_row,
)
from reprise.kernels.views import Bf16, Constant, Fp32, Int32, Int64

__all__ = [
    "ATTEND",
    "COMPLETE",
    "E2M1",
    "LANES",
    "LAYER_FIELDS",
    "LOG2_E",
    "PLAIN",
    "PRODUCT_FIELDS",
    "PROJECT",
    "TURN",
    "WITH_LOWS",
    "Inputs",
    "Rows",
    "Shape",
    "attend",
    "embed",
    "gated",
    "linear",
    "linear_in_float32",
    "norm",
    "packed_kernel",
    "plan",
    "run",
    "self_test",
    "words_kernel",
]


_TOGETHER = 1 << 15  # numbers; to wake the other threads takes as long as one needs for so many


@compiled(fastmath={"reassoc", "contract"})
def _square_sum(x: Bf16) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += widened(x[i]) * widened(x[i])
    return total


@compiled(error_model="numpy")
def _norm_row(x: Bf16, weight: Fp32, eps: float, out: Bf16) -> None:
    scale = np.float32(1.0) / np.sqrt(_square_sum(x) / np.float32(len(weight)) + np.float32(eps))
    for i in range(len(weight)):
        out[i] = rounded(widened(x[i]) * scale * weight[i])


@compiled(parallel=True)
def _norm_together(x: Bf16, weight: Fp32, eps: float, out: Bf16) -> None:
    for row in prange(len(x)):
        _norm_row(x[row], weight, eps, out[row])


@compiled()
def norm(x: Bf16, weight: Fp32, eps: float, out: Bf16) -> None:
    """Compute RMSNorm of rows. x, out bf16 [rows, width]; weight fp32 [width]; sums and products in fp32.
    One core takes 230 us for 1,124 rows of 768, and 900 with torch."""
    if x.size < _TOGETHER:
        for row in range(len(x)):
            _norm_row(x[row], weight, eps, out[row])
    else:
        _norm_together(x, weight, eps, out)


@compiled()
def _widen_row(x: Bf16, row: int, dots: Constant, wide: Fp32, narrow: Bf16, sums: Fp32) -> None:
    for i in range(x.shape[1]):
        wide[row, i] = widened(x[row, i])
    set_row(Inputs(wide, narrow, sums), row, x.shape[1], dots)


@compiled(parallel=True)
def _widen(x: Bf16, dots: Constant, wide: Fp32, narrow: Bf16, sums: Fp32) -> None:
    for row in prange(len(x)):
        _widen_row(x, row, dots, wide, narrow, sums)


@compiled()
def _inputs(x: Bf16, width: int, dots: Constant) -> Inputs:
    """Return rows prepared for matrix products: as bf16 if the processor has dot products of bf16 pairs (`dots`), else
    as fp32, with the sums of their groups. width: numbers of a row, with padding."""
    inputs: Inputs = make_inputs(len(x), width)
    if x.size < _TOGETHER:
        for row in range(len(x)):
            _widen_row(x, row, dots, inputs.wide, inputs.narrow, inputs.sums)
    else:
        _widen(x, dots, inputs.wide, inputs.narrow, inputs.sums)
    return inputs


@compiled()
def _find(products: Int64, task: int) -> tuple[int, int]:
    """Return (index of a product, block of its outputs) for a task. products: int64 [products, PRODUCT_FIELDS], each
    row describing a matrix product. Tasks are numbered through the blocks of all products."""
    which, block = 0, task
    while block >= blocks_of(products[which]):
        block -= blocks_of(products[which])
        which += 1
    return which, block


@compiled(parallel=True, error_model="numpy")
def _multiply(x: Inputs, products: Int64, dots: Constant, residual: Bf16, out: Bf16) -> None:
    count, total = len(out), 0
    for which in range(len(products)):
        total += blocks_of(products[which])
    for task in prange(total):
        which, block = _find(products, np.int64(task))  # numba counts without a sign
        product = products[which]
        size = product[SIZE]
        sums = np.empty((count, size), np.float32)
        scratch = np.empty(scratch_size(product, count), np.uint16)
        multiply_block(product, block, place_at(x, dots, sums), scratch)
        first = product[FIRST] + block * size
        width = min(size, product[OUTPUTS] - block * size)
        for row in range(count):
            to = out[row, first : first + width]
            if len(residual):
                for i in range(width):
                    sums[row, i] += widened(residual[row, first + i])
            for i in range(width):
                to[i] = rounded(sums[row, i])


@compiled()
def linear(x: Bf16, products: Int64, dots: Constant, residual: Bf16, out: Bf16) -> None:
    """Compute linear layers of the same rows: x bf16 [rows, inputs] -> out bf16 [rows, outputs of all layers]. products
    int64 [layers, PRODUCT_FIELDS]: a description of each layer's weight. residual bf16, shaped like out, is added
    before rounding; with no rows nothing is added. dots: of length 1 to use dot products of bf16 pairs, else 0."""
    _multiply(_inputs(x, products[0, INPUTS], dots), products, dots, residual, out)


@compiled()
def _wide_inputs(x: Fp32, width: int) -> Inputs:
    """Return rows prepared for matrix products in fp32. width: numbers of a row, with padding."""
    inputs: Inputs = make_inputs(len(x), width)
    for row in range(len(x)):
        inputs.wide[row, : x.shape[1]] = x[row]
        set_row(inputs, row, x.shape[1], ())
    return inputs


@compiled()
def _wide_block(x: Inputs, product: Int64, block: int, out: Fp32) -> None:
    size = product[SIZE]
    sums, unused = np.empty((len(out), size), np.float32), np.empty(0, np.uint16)
    multiply_block(product, block, place_at(x, (), sums), unused)
    width = min(size, product[OUTPUTS] - block * size)
    for row in range(len(out)):
        out[row, block * size : block * size + width] = sums[row, :width]


@compiled(parallel=True)
def _multiply_wide(x: Inputs, product: Int64, out: Fp32) -> None:
    for block in prange(blocks_of(product)):
        _wide_block(x, product, np.int64(block), out)  # numba counts without a sign


@compiled()
def linear_in_float32(x: Fp32, product: Int64, out: Fp32) -> None:
    """Compute a linear layer without rounding: x fp32 [rows, inputs] -> out fp32 [rows, outputs]. product int64
    [PRODUCT_FIELDS], with a kernel that uses no dot products of bf16 pairs."""
    _multiply_wide(_wide_inputs(x, product[INPUTS]), product, out)


@compiled(parallel=True, error_model="numpy")
def _multiply_gated(x: Inputs, gate: Int64, up: Int64, dots: Constant, out: Bf16) -> None:
    count, size = len(out), gate[SIZE]
    for task in prange(blocks_of(gate)):
        block = np.int64(task)  # numba counts without a sign
        gates, ups = np.empty((count, size), np.float32), np.empty((count, size), np.float32)
        scratch = np.empty(max(scratch_size(gate, count), scratch_size(up, count)), np.uint16)
        multiply_block(gate, block, place_at(x, dots, gates), scratch)
        multiply_block(up, block, place_at(x, dots, ups), scratch)
        gate_in_place(gates.ctypes.data, ups.ctypes.data, count * size // LANES)
        width = min(size, out.shape[1] - block * size)
        for row in range(count):
            to = out[row, block * size : block * size + width]
            for i in range(width):
                to[i] = rounded(gates[row, i])


@compiled()
def gated(x: Bf16, gate: Int64, up: Int64, dots: Constant, out: Bf16) -> None:
    """Compute silu(gate(x)) * up(x), rounded once: x bf16 [rows, inputs] -> out bf16 [rows, outputs]. gate, up int64
    [PRODUCT_FIELDS], with blocks of one size."""
    _multiply_gated(_inputs(x, gate[INPUTS], dots), gate, up, dots, out)


@compiled()
def embed(product: Int64, rows: Int64, out: Bf16) -> None:
    """Unpack rows of a packed weight, as an embedding does: product int64 [PRODUCT_FIELDS], which describes the weight;
    rows int64 [n], which must exist -> out bf16 [n, inputs]."""
    for place in range(len(rows)):
        unpack_row(product, rows[place], out[place])


@compiled(parallel=True)
def attend(
    q: Fp32,
    k: Bf16,
    v: Bf16,
    table: Int32,
    parts: AttentionTasks,
    group: Constant,
    k_lanes: Constant,
    v_lanes: Constant,
    is_packed: bool,
    out: Fp32,
) -> None:
    """Compute attention of single query rows, each at the end of its context. q fp32 [rows, heads, k_dim], multiplied
    by scale * log2(e); k, v bf16 [pages, page_size, kv_heads, dim], with any strides except that dim is contiguous, or
    is_packed: rows as in `reprise.kernels.cpu.packed_heads`, two bytes to each element; table int32 [rows, pages];
    parts: the tasks from `plan`; out fp32 [rows, heads, v_dim]. group, k_lanes, v_lanes: tuples whose lengths are the
    query heads per kv head and the vectors of 16 numbers in a head of keys and of values."""
    heads, dim, kv_heads, page_size = out.shape[1], out.shape[2], k.shape[2], k.shape[1]
    mixed = np.empty((len(parts.row), heads, dim), np.float32)
    stats = np.empty((len(parts.row), heads, 2), np.float32)
    keys = Pool(k.ctypes.data, k.strides[0], k.strides[1], k.strides[2], is_packed)
    values = Pool(v.ctypes.data, v.strides[0], v.strides[1], v.strides[2], is_packed)
    for task in prange(len(parts.row) * kv_heads):
        part, kv_head = task // kv_heads, task % kv_heads
        row, head = parts.row[part], kv_head * len(group)
        attend_part(
            q[row, head].ctypes.data,
            keys,
            values,
            kv_head,
            page_size,
            table[row],
            parts.first[part],
            parts.keys[part],
            group,
            k_lanes,
            v_lanes,
            mixed[part, head].ctypes.data,
            stats[part, head].ctypes.data,
        )
    for row in range(len(out)):
        for head in range(heads):
            merge_parts(mixed, stats, parts.starts[row], parts.starts[row + 1], head, out[row, head])


def self_test() -> None:
    """Compile and run one parallel loop, and check its result. Raises an error if anything is wrong."""
    x = np.arange(64, dtype=np.uint16).reshape(1, 64) % 7 + 0x3F80
    out = np.empty_like(x)
    norm(x, np.ones(64, np.float32), 1e-5, out)
    wide, got = ((y.astype(np.uint32) << 16).view(np.float32) for y in (x, out))
    if not np.allclose(got, wide / np.sqrt((wide**2).mean() + 1e-5), rtol=2**-7):
        raise RuntimeError("a compiled norm is wrong")
    if threading_layer() != "omp":
        raise RuntimeError(f"numba's threads are of {threading_layer()}")
