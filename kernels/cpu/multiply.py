"""Multiplies rows with a layer's weights, block by block, by the kernels of `reprise.kernels.cpu.blocks`.

Sums are fp32; the inputs of a product are rounded to bf16 where dot products of pairs multiply them. The order of a sum
depends only on the row it belongs to, not on other rows of the batch or the number of threads. NaN stays NaN.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils

from reprise.kernels.cpu.blocks import (
    BITS,
    BLOCK,
    CODES,
    E2M1,
    FEW,
    FIRST,
    GROUP,
    GROUP_SIZE,
    INPUTS,
    KERNEL,
    KIND,
    LOWS,
    OUTPUTS,
    PLAIN,
    SCALES,
    SIZE,
    WITH_LOWS,
    Place,
    call_kernel,
)
from reprise.kernels.cpu.emit import LANES, Emit, bytes_at, compiled, emitted, half_at, rounded, widened
from reprise.kernels.packed import TABLES, ZERO
from reprise.kernels.views import Bf16, Constant, Fp32, Int64

_E2M1 = np.array(TABLES["e2m1"], np.float32)


class Inputs(NamedTuple):
    """The rows that matrix products multiply: in fp32 (`wide`), in bf16 (`narrow`), and the sum of each group of
    inputs. Products read `narrow` if the processor has dot products of bf16 pairs, else `wide`."""

    wide: Fp32
    narrow: Bf16
    sums: Fp32


@compiled(fastmath={"reassoc", "contract"})
def _sum(x: Fp32) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@compiled()
def make_inputs(rows: int, inputs: int) -> Inputs:
    return Inputs(
        np.zeros((rows, inputs), np.float32),
        np.zeros((rows, inputs), np.uint16),
        np.zeros((rows, inputs // GROUP), np.float32),
    )


@compiled()
def set_part(x: Inputs, row: int, begin: int, end: int, dots: Constant) -> None:
    """Prepare numbers begin to end - 1 of a row's inputs, whole groups in `x.wide`, for products: round them to bf16 if
    `dots` (dot products of bf16 pairs), and sum up each group, as weights with lows (numbers added to a group) need."""
    wide = x.wide[row, begin:end]
    if len(dots):
        narrow = x.narrow[row, begin:end]
        for i in range(len(wide)):
            narrow[i] = rounded(wide[i])
            wide[i] = widened(narrow[i])
    for group in range(len(wide) // GROUP):
        x.sums[row, begin // GROUP + group] = _sum(wide[group * GROUP : (group + 1) * GROUP])


@compiled()
def set_row(x: Inputs, row: int, width: int, dots: Constant) -> None:
    """Prepare a row, whose `width` numbers are in `x.wide`, for products, as `set_part` does. The numbers after `width`
    become 0."""
    padded = (width + GROUP - 1) // GROUP * GROUP
    x.wide[row, width:padded] = np.float32(0.0)
    set_part(x, row, 0, padded, dots)


@compiled()
def multiply_block(product: Int64, block: int, place: Place, scratch: Bf16) -> None:
    """Compute one block of a matrix product's outputs for all rows, and add the bias. scratch: memory of `scratch_size`
    numbers."""
    rows, x, x_row, sums, sums_row, out, out_row = place
    call_kernel(
        product[KERNEL], product.ctypes.data, block, rows, x, x_row, sums, sums_row, out, out_row, scratch.ctypes.data
    )


@compiled()
def scratch_size(product: Int64, rows: int) -> Any:
    """Return how many numbers of scratch `multiply_block` needs."""
    return product[INPUTS] * BLOCK if rows > FEW and product[BITS] else 0


@compiled()
def blocks_of(product: Int64) -> Any:
    """Return the number of blocks of a product's outputs."""
    return (product[OUTPUTS] + product[SIZE] - 1) // product[SIZE] if product[KERNEL] else 0


@compiled()
def end_of(product: Int64) -> Any:
    """Return the column after the last block of a product's outputs, in an array of rows into which several products
    write side by side. product: describes the product, with its first column."""
    return product[FIRST] + blocks_of(product) * product[SIZE]


@compiled()
def unpack_row(product: Int64, row: int, out: Bf16) -> None:
    """Unpack the weights of one output of a packed product, rounded to bf16."""
    inputs, bits, size, kind = product[INPUTS], product[BITS], product[GROUP_SIZE], product[KIND]
    block, place = row // BLOCK, row % BLOCK
    codes = carray(
        bytes_at(product[CODES] + block * inputs * BLOCK * bits // 8), (inputs * BLOCK * bits // 8,), np.uint8
    )
    groups = inputs // size
    for i in range(len(out)):
        pair, odd = i // 2, i % 2
        if bits == 4:
            quad, nibble = pair // 4, pair % 4
            byte = np.int64(codes[((quad * 2 + place // 16) * 16 + place % 16) * 4 + odd * 2 + nibble // 2])
            code = (byte >> (nibble % 2 * 4)) & 15
            if kind == PLAIN:
                code -= ZERO
        else:
            code = np.int64(np.int8(codes[(pair * BLOCK + place) * 2 + odd]))
        at = ((block * groups + i // size) * BLOCK + place) * 2
        meant = _E2M1[code] if kind == E2M1 else np.float32(code)
        number = meant * half_at(product[SCALES] + at)
        if kind == WITH_LOWS:
            number += half_at(product[LOWS] + at)
        out[i] = rounded(number)


@compiled()
def place_at(x: Inputs, dots: Constant, out: Fp32) -> Place:
    """Return the addresses that the kernel for one block of a product needs: of all rows of inputs, and of the block's
    outputs. out fp32 [rows, columns]: the array of outputs, from the block's first column on."""
    sums, sums_row, out_at, out_row = x.sums.ctypes.data, x.sums.strides[0], out.ctypes.data, out.strides[0]
    if len(dots):
        return Place(len(out), x.narrow.ctypes.data, x.narrow.strides[0], sums, sums_row, out_at, out_row)
    return Place(len(out), x.wide.ctypes.data, x.wide.strides[0], sums, sums_row, out_at, out_row)


@emitted
def gate_in_place(e: Emit, gate: ir.Value, up: ir.Value, vectors: ir.Value) -> None:
    """Compute silu(gate) * up in place of gate, both fp32. vectors: how many vectors of 16 numbers."""
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(gate, e.mul(loop.index, LANES * 4))
        e.store(e.b.fmul(e.swish(e.load(here)), e.load(e.at(up, e.mul(loop.index, LANES * 4)))), here)


@compiled()
def multiply(products: Int64, task: int, chunk: int, x: Inputs, dots: Constant, out: Fp32, scratch: Bf16) -> None:
    """Do one task of some products of the same inputs x: blocks task * chunk to (task + 1) * chunk - 1, numbered
    through all products. Writes out fp32 [rows, columns], the outputs of all products side by side. scratch: memory for
    unpacking."""
    passed = 0
    for which in range(len(products)):
        product = products[which]
        blocks = blocks_of(product)
        for block in range(max(0, task * chunk - passed), min(blocks, (task + 1) * chunk - passed)):
            column = product[FIRST] + block * product[SIZE]
            multiply_block(product, block, place_at(x, dots, out[:, column:]), scratch)
        passed += blocks


@compiled()
def multiply_gated(
    products: Int64, task: int, chunk: int, x: Inputs, dots: Constant, ups: Fp32, out: Inputs, scratch: Bf16
) -> None:
    """Do one task of silu(gate(x)) * up(x), for the blocks task * chunk to (task + 1) * chunk - 1 of both products.
    products: gate and up, which must have blocks of the same size, consisting of whole groups. ups: memory for up(x),
    of the size of `out.wide`. scratch: memory for unpacking."""
    gate, up = products[0], products[1]
    size = gate[SIZE]
    for block in range(task * chunk, min(blocks_of(gate), (task + 1) * chunk)):
        begin, end = block * size, min(block * size + size, out.wide.shape[1])
        multiply_block(gate, block, place_at(x, dots, out.wide[:, begin:]), scratch)
        multiply_block(up, block, place_at(x, dots, ups[:, begin:]), scratch)
        for row in range(len(out.wide)):
            here = out.wide[row, begin:end]
            gate_in_place(here.ctypes.data, ups[row, begin:end].ctypes.data, size // LANES)
            set_part(out, row, begin, end, dots)
