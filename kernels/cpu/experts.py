"""Multiplies rows by the packed weights of the experts that a router chose for them, compiled by numba for CPUs.

All experts of a projection are one packed weight, expert after expert, each in whole blocks of outputs. A pair is a row
and one of its experts; pair p belongs to row p // experts a row. Pairs are sorted by expert, so that an expert's weight
is read once for all of its rows. A row's result has the same bits whatever other rows there are.

Import this through `reprise.kernels.cpu.available.expert_kernels`.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from reprise.kernels.cpu.blocks import INPUTS, SIZE, Place
from reprise.kernels.cpu.emit import LANES, compiled, rounded, widened
from reprise.kernels.cpu.multiply import (
    Inputs,
    blocks_of,
    gate_in_place,
    make_inputs,
    multiply_block,
    place_at,
    scratch_size,
    set_part,
    set_row,
)
from reprise.kernels.views import Bf16, Constant, Fp32, Int64


class Assignment(NamedTuple):
    """The assignment of pairs (a row and one of its experts) to experts. pairs int64 [pairs]: the pairs, sorted by
    expert. experts int64 [used]: the experts that have pairs. starts int64 [used + 1]: expert experts[i] has the pairs
    at places starts[i] to starts[i + 1] - 1 of `pairs`."""

    pairs: Int64
    experts: Int64
    starts: Int64


@compiled()
def assign(chosen: Int64, num_experts: int) -> Assignment:
    """Sort the pairs (a row and one of its experts) by expert, and those of one expert by row. chosen int64 [rows,
    experts a row]: the experts of each row. Numbers that are no expert's are left out: routers write them for rows with
    fewer experts."""
    flat = chosen.ravel()
    ends = np.zeros(num_experts + 1, np.int64)
    for expert in flat:
        if 0 <= expert < num_experts:
            ends[expert + 1] += 1
    used = np.count_nonzero(ends)
    for number in range(num_experts):
        ends[number + 1] += ends[number]
    experts, starts = np.empty(used, np.int64), np.empty(used + 1, np.int64)
    filled = 0
    for number in range(num_experts):
        if ends[number + 1] > ends[number]:
            experts[filled], starts[filled] = number, ends[number]
            filled += 1
    starts[used] = ends[num_experts]
    pairs = np.empty(ends[num_experts], np.int64)
    for pair in range(len(flat)):
        if 0 <= flat[pair] < num_experts:
            pairs[ends[flat[pair]]] = pair
            ends[flat[pair]] += 1
    return Assignment(pairs, experts, starts)


@compiled()
def _gather_row(x: Bf16, row: int, dots: Constant, place: int, to: Inputs) -> None:
    for i in range(x.shape[1]):
        to.wide[place, i] = widened(x[row, i])
    set_row(to, place, x.shape[1], dots)


@compiled(parallel=True)
def _gather(x: Bf16, rows: Int64, dots: Constant, to: Inputs) -> None:
    for place in prange(len(rows)):
        _gather_row(x, rows[place], dots, np.int64(place), to)


@compiled()
def _gathered(x: Bf16, rows: Int64, width: int, dots: Constant) -> Inputs:
    """Return some rows of x, prepared for products. width: inputs, with padding."""
    inputs: Inputs = make_inputs(len(rows), width)
    _gather(x, rows, dots, inputs)
    return inputs


@compiled()
def _place(x: Inputs, first: int, end: int, dots: Constant, out: Fp32) -> Place:
    """Return what a kernel needs to multiply rows first to end - 1. out fp32 [end - first, columns]."""
    place: Place = place_at(Inputs(x.wide[first:end], x.narrow[first:end], x.sums[first:end]), dots, out)
    return place


@compiled()
def _gated_block(
    x: Inputs, to: Assignment, which: int, block: int, product: Int64, dots: Constant, out: Inputs
) -> None:
    """Compute one block of silu(gate(x)) * up(x) for the pairs of one used expert. Up's blocks follow those of gate."""
    size, first, end = product[SIZE], to.starts[which], to.starts[which + 1]
    blocks = out.wide.shape[1] // size
    gates, ups = np.empty((end - first, size), np.float32), np.empty((end - first, size), np.float32)
    scratch = np.empty(scratch_size(product, end - first), np.uint16)
    at = to.experts[which] * 2 * blocks + block
    multiply_block(product, at, _place(x, first, end, dots, gates), scratch)
    multiply_block(product, at + blocks, _place(x, first, end, dots, ups), scratch)
    gate_in_place(gates.ctypes.data, ups.ctypes.data, (end - first) * size // LANES)
    for row in range(end - first):
        out.wide[first + row, block * size : (block + 1) * size] = gates[row]
        set_part(out, first + row, block * size, (block + 1) * size, dots)


@compiled(parallel=True, error_model="numpy")
def _multiply_gated(x: Inputs, to: Assignment, product: Int64, dots: Constant, out: Inputs) -> None:
    blocks = out.wide.shape[1] // product[SIZE]
    for task in prange(len(to.experts) * blocks):
        # numba counts without a sign
        _gated_block(x, to, np.int64(task) // blocks, np.int64(task) % blocks, product, dots, out)


@compiled()
def _wide_block(x: Inputs, to: Assignment, which: int, block: int, product: Int64, dots: Constant, out: Fp32) -> None:
    size, first, end = product[SIZE], to.starts[which], to.starts[which + 1]
    scratch = np.empty(scratch_size(product, end - first), np.uint16)
    there = out[first:end, block * size : (block + 1) * size]
    at = to.experts[which] * (out.shape[1] // size) + block
    multiply_block(product, at, _place(x, first, end, dots, there), scratch)


@compiled(parallel=True, error_model="numpy")
def _multiply_wide(x: Inputs, to: Assignment, product: Int64, dots: Constant, out: Fp32) -> None:
    """Compute one projection for all pairs, unrounded. out fp32 [pairs, outputs of an expert, whole blocks]."""
    blocks = out.shape[1] // product[SIZE]
    for task in prange(len(to.experts) * blocks):
        _wide_block(x, to, np.int64(task) // blocks, np.int64(task) % blocks, product, dots, out)


@compiled(parallel=True)
def _round(parts: Fp32, out: Bf16) -> None:
    for row in prange(len(out)):
        for i in range(out.shape[1]):
            out[row, i] = rounded(parts[row, i])


@compiled()
def multiply(x: Bf16, rows: Int64, to: Assignment, product: Int64, num_experts: int, dots: Constant, out: Bf16) -> None:
    """Compute one projection for all pairs. x bf16 [n, inputs]; rows int64 [pairs]: the row of x that each pair of
    `to.pairs` multiplies. product int64 [PRODUCT_FIELDS]: the weight of all experts. out bf16 [pairs, outputs], in the
    order of `to.pairs`. dots: of length 1 to use dot products of bf16 pairs, else 0."""
    parts = np.empty((len(rows), blocks_of(product) // num_experts * product[SIZE]), np.float32)
    _multiply_wide(_gathered(x, rows, product[INPUTS], dots), to, product, dots, parts)
    _round(parts, out)


@compiled()
def _gathered_wide(x: Fp32, rows: Int64, width: int) -> Inputs:
    """Return some rows of x, prepared for products in fp32. width: inputs, with padding."""
    inputs: Inputs = make_inputs(len(rows), width)
    for place in range(len(rows)):
        inputs.wide[place, : x.shape[1]] = x[rows[place]]
        set_row(inputs, place, x.shape[1], ())
    return inputs


@compiled()
def multiply_in_float32(x: Fp32, rows: Int64, to: Assignment, product: Int64, num_experts: int, out: Fp32) -> None:
    """Do the same as `multiply` without rounding: x, out fp32. product has a kernel that uses no dot products of bf16
    pairs."""
    parts = np.empty((len(rows), blocks_of(product) // num_experts * product[SIZE]), np.float32)
    _multiply_wide(_gathered_wide(x, rows, product[INPUTS]), to, product, (), parts)
    out[:] = parts[:, : out.shape[1]]


@compiled(parallel=True)
def _add_up(parts: Fp32, places: Int64, weights: Fp32, out: Bf16) -> None:
    for row in prange(len(out)):
        total = np.zeros(out.shape[1], np.float32)
        for n in range(weights.shape[1]):
            place = places[row * weights.shape[1] + n]
            if place >= 0:
                for i in range(len(total)):
                    total[i] += weights[row, n] * parts[place, i]
        for i in range(len(total)):
            out[row, i] = rounded(total[i])


@compiled()
def gated_experts(
    x: Bf16, chosen: Int64, weights: Fp32, num_experts: int, gate_up: Int64, down: Int64, dots: Constant, out: Bf16
) -> None:
    """Compute a layer of experts with SiLU gates: the sum of weight * down(silu(gate(x)) * up(x)) over a row's experts,
    rounded once. x, out bf16 [rows, width]; chosen int64, weights fp32 [rows, experts a row]. gate_up, down int64
    [PRODUCT_FIELDS]: the weights of all experts; gate and up have whole blocks."""
    to = assign(chosen, num_experts)
    pairs = len(to.pairs)
    middle: Inputs = make_inputs(pairs, down[INPUTS])
    _multiply_gated(_gathered(x, to.pairs // chosen.shape[1], gate_up[INPUTS], dots), to, gate_up, dots, middle)
    parts = np.empty((pairs, blocks_of(down) // num_experts * down[SIZE]), np.float32)
    _multiply_wide(middle, to, down, dots, parts)
    places = np.full(chosen.size, -1)
    places[to.pairs] = np.arange(pairs)
    _add_up(parts, places, weights, out)


def self_test() -> None:
    """Compile what sorts pairs, and check its result. Raises an error if it is wrong. Products are checked on the
    weights of a model, as those of packed layers are."""
    to = assign(np.array([[2, 0], [2, 3]], np.int64), 3)
    if [list(part) for part in to] != [[1, 0, 2], [0, 2], [0, 1, 3]]:
        raise RuntimeError("pairs of rows and experts are sorted wrongly")
