"""Computes runs of decoder layers for a few rows, which is what a decode step of a few streams has, in one compiled
call.

A run is a sequence of phases, through which its threads go together as in `reprise.kernels.cpu.phases`. Threads enter
once and stay until the run ends. Callers import it from `reprise.kernels.cpu.decode`.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import carray, prange

from reprise.kernels.cpu.attend import AttentionTasks, Pool, attend_part, merge_parts
from reprise.kernels.cpu.blocks import BLOCK, FEW, GROUP, INPUTS, PRODUCT_FIELDS
from reprise.kernels.cpu.emit import compiled, fp32_at, rounded, widened
from reprise.kernels.cpu.heads import inverse_rms, settle_head, turn_head
from reprise.kernels.cpu.layer_fields import (
    DOWN,
    GATE,
    INPUT_NORM,
    K_NORM,
    K_POOL,
    OUT,
    POST_NORM,
    Q_NORM,
    UP,
    V_POOL,
    K,
    Q,
    Shape,
    V,
)
from reprise.kernels.cpu.multiply import Inputs, blocks_of, end_of, multiply, multiply_gated, set_row
from reprise.kernels.cpu.phases import COUNTERS, DONE, NEXT, PHASE_BITS, publish, take, wait_for
from reprise.kernels.views import Bf16, Constant, Fp32, Int32, Int64

# The parts of a layer at which a call may begin or end.
PROJECT, TURN, ATTEND, COMPLETE = range(4)

_HEADS_TOGETHER = 4  # heads that one task rotates


class Rows(NamedTuple):
    """The rows of a step, with what the parts of a layer (PROJECT, TURN, ATTEND and COMPLETE) read and write.

    hidden bf16 [rows, width]: changed in place. heads bf16 [rows, q + k + v heads, dim]: written by PROJECT, which
    multiplies. q fp32 [rows, q heads, dim]: written by TURN, which rotates. mixed fp32 [rows, q heads, dim]: written by
    ATTEND. cos, sin bf16 [rows, dim]. slots int64 [rows]: where the pool receives keys and values. table int32 [rows,
    pages]. spots int64 [rows, 2]: (slot of DRAM in which a row is saved, row in it); slot -1: it is not saved. Without
    rows nothing is saved.
    """

    hidden: Bf16
    heads: Bf16
    q: Fp32
    mixed: Fp32
    cos: Bf16
    sin: Bf16
    slots: Int64
    table: Int32
    spots: Int64


class Scratch(NamedTuple):
    """The memory that the threads of a run share.

    fp32 [rows, width]: hidden and middle, a layer's rows before and after attention. Inputs of products: wide fp32,
    narrow bf16, and sums of their groups; gates, narrow_gates and sums_of_gates, the same for the product after the
    gate. fp32 [rows, outputs]: ups, and made, the outputs of products. mixed, stats fp32 [parts, heads, ...]: results
    of attention's tasks.
    """

    hidden: Fp32
    middle: Fp32
    wide: Fp32
    narrow: Bf16
    sums: Fp32
    gates: Fp32
    narrow_gates: Bf16
    sums_of_gates: Fp32
    ups: Fp32
    made: Fp32
    mixed: Fp32
    stats: Fp32


# The phases of a layer, in order: each ends before the next begins.
_NORM, _PROJECT, _HEADS, _ATTEND, _MERGE, _OUTPUT, _POST_NORM_PHASE, _GATED, _DOWN_PHASE = range(9)
_PHASES = 9


@compiled()
def _begins(part: int) -> int:
    """Return the first phase of a part (PROJECT, TURN, ATTEND or COMPLETE) of a layer."""
    if part == PROJECT:
        return _NORM
    if part == TURN:
        return _HEADS
    return _ATTEND if part == ATTEND else _MERGE


@compiled()
def _ends(part: int) -> int:
    """Return the phase after the last one of a part of a layer (PROJECT, TURN, ATTEND or COMPLETE). Heads are
    normalised and rounded in the last phase of PROJECT, in which TURN rotates them."""
    if part in (PROJECT, TURN):
        return _HEADS + 1
    return _MERGE + 1 if part == ATTEND else _PHASES


@compiled()
def _chunk(blocks: int, threads: int) -> Any:
    """Return how many adjacent blocks of outputs a task computes: a quarter of a thread's share."""
    return max(1, blocks // (threads * 4))


@compiled()
def _num_blocks(layer: Int64, kind: int) -> Any:
    if kind == _PROJECT:
        return blocks_of(_product(layer, Q)) + blocks_of(_product(layer, K)) + blocks_of(_product(layer, V))
    if kind == _OUTPUT:
        return blocks_of(_product(layer, OUT))
    return blocks_of(_product(layer, GATE if kind == _GATED else DOWN))


@compiled()
def _num_tasks(layer: Int64, kind: int, rows: Rows, parts: int, num_k: int, threads: int) -> Any:
    """Return the number of a phase's tasks, at least one. kind: the phase of a layer. parts: ranges of keys into which
    the rows' contexts are divided for attention. num_k: kv heads."""
    if kind in (_NORM, _MERGE, _POST_NORM_PHASE):
        return len(rows.hidden)
    if kind == _HEADS:
        heads = rows.heads.shape[0] * rows.heads.shape[1]
        return (heads + _HEADS_TOGETHER - 1) // _HEADS_TOGETHER
    if kind == _ATTEND:
        return parts * num_k
    blocks = _num_blocks(layer, kind)
    chunk = _chunk(blocks, threads)
    return (blocks + chunk - 1) // chunk


@compiled()
def _normalise(x: Inputs, row: int, hidden: Fp32, weight: int, eps: float, dots: Constant) -> None:
    width = len(hidden)
    weights = carray(fp32_at(weight), (width,), np.float32)
    scale = inverse_rms(hidden, eps)
    wide = x.wide[row]
    for i in range(width):
        wide[i] = hidden[i] * scale * weights[i]
    set_row(x, row, width, dots)


@compiled()
def _finish_row(scratch: Scratch, row: int) -> None:
    """Compute a layer's result for a row from its last product, rounded to bf16 as between layers, into
    scratch.hidden."""
    hidden, made, middle = scratch.hidden[row], scratch.made[row], scratch.middle[row]
    for i in range(len(hidden)):
        hidden[i] = widened(rounded(made[i] + middle[i]))


@compiled()
def _do(
    layer: Int64,
    numbers: Any,
    kind: int,
    task: int,
    is_first: bool,
    settles: bool,
    turns: bool,
    merges: bool,
    shape: Shape,
    rows: Rows,
    tasks: AttentionTasks,
    scratch: Scratch,
    group: Constant,
    lanes: Constant,
    dots: Constant,
    threads: int,
    unpacked: Bf16,
) -> None:
    """Do one task of a phase. kind: the phase of a layer. is_first: it belongs to the run's first layer. settles,
    turns: whether heads are to be normalised and rounded, and to be rotated and written to the pool. merges: whether
    this run has computed the layer's attention, whose parts are then still to be merged. unpacked: memory for unpacking
    a block. For the other parameters see `run`."""
    x = Inputs(scratch.wide, scratch.narrow, scratch.sums)
    dim = rows.heads.shape[2]
    if kind == _NORM:
        if not is_first:
            _finish_row(scratch, task)
        _normalise(x, task, scratch.hidden[task], layer[INPUT_NORM], numbers[0], dots)
    elif kind == _HEADS:
        heads = rows.heads.shape[1]
        last = min((task + 1) * _HEADS_TOGETHER, len(rows.heads) * heads)
        for place in range(task * _HEADS_TOGETHER, last):
            row, head = place // heads, place % heads
            out = rows.heads[row, head]
            if settles:
                norm, eps = 0, 0.0
                if head < shape.num_q:
                    norm, eps = layer[Q_NORM], numbers[1]
                elif head < shape.num_q + shape.num_k:
                    norm, eps = layer[K_NORM], numbers[2]
                settle_head(scratch.made[row, head * dim : (head + 1) * dim], norm, eps, out)
            if turns:
                cos, sin, slot = rows.cos[row], rows.sin[row], rows.slots[row]
                turn_head(shape, layer, row, head, out, cos, sin, slot, rows.spots, np.float32(numbers[4]), rows.q)
    elif kind == _ATTEND:
        part, kv_head = task // shape.num_k, task % shape.num_k
        row, head = tasks.row[part], kv_head * len(group)
        attend_part(
            rows.q[row, head].ctypes.data,
            Pool(layer[K_POOL], shape.k_page, shape.k_row, shape.k_head, shape.is_packed),
            Pool(layer[V_POOL], shape.v_page, shape.v_row, shape.v_head, shape.is_packed),
            kv_head,
            shape.page_size,
            rows.table[row],
            tasks.first[part],
            tasks.keys[part],
            group,
            lanes,
            lanes,
            scratch.mixed[part, head].ctypes.data,
            scratch.stats[part, head].ctypes.data,
        )
    elif kind == _MERGE:
        for head in range(shape.num_q):
            mixed = rows.mixed[task, head]
            if merges:
                begin, end = tasks.starts[task], tasks.starts[task + 1]
                merge_parts(scratch.mixed, scratch.stats, begin, end, head, mixed)
            wide = x.wide[task, head * dim : (head + 1) * dim]
            for d in range(dim):
                wide[d] = mixed[d]
        set_row(x, task, shape.num_q * dim, dots)
    elif kind == _POST_NORM_PHASE:
        middle, made, hidden = scratch.middle[task], scratch.made[task], scratch.hidden[task]
        for i in range(len(hidden)):
            middle[i] = made[i] + hidden[i]
        _normalise(x, task, middle, layer[POST_NORM], numbers[3], dots)
    else:
        chunk = _chunk(_num_blocks(layer, kind), threads)
        gates = Inputs(scratch.gates, scratch.narrow_gates, scratch.sums_of_gates)
        if kind == _PROJECT:
            multiply(_products(layer, Q, V), task, chunk, x, dots, scratch.made, unpacked)
        elif kind == _OUTPUT:
            multiply(_products(layer, OUT, OUT), task, chunk, x, dots, scratch.made, unpacked)
        elif kind == _GATED:
            multiply_gated(_products(layer, GATE, UP), task, chunk, x, dots, scratch.ups, gates, unpacked)
        else:
            multiply(_products(layer, DOWN, DOWN), task, chunk, gates, dots, scratch.made, unpacked)


@compiled()
def _work(
    counters: Int64,
    layers: Int64,
    numbers: Any,
    first: int,
    last: int,
    begin: int,
    end: int,
    shape: Shape,
    rows: Rows,
    tasks: AttentionTasks,
    scratch: Scratch,
    group: Constant,
    lanes: Constant,
    dots: Constant,
    threads: int,
) -> None:
    """Do the work of one thread: take the next task and do it, until there are no more phases. counters: shared by the
    threads. For the other parameters see `run`."""
    unpacked = np.empty(scratch.gates.shape[1] * BLOCK if len(rows.hidden) > FEW else 0, np.uint16)
    end_phase = (last - 1) * _PHASES + _ends(end)
    while True:
        ticket = take(counters, NEXT)
        phase, task = ticket >> PHASE_BITS, ticket & ((1 << PHASE_BITS) - 1)
        if phase >= end_phase:
            return
        index, kind = phase // _PHASES, phase % _PHASES
        count = _num_tasks(layers[index], kind, rows, len(tasks.row), shape.num_k, threads)
        if task >= count:
            wait_for(counters, phase)
            continue
        starts, stops = begin if index == first else PROJECT, end if index == last - 1 else COMPLETE
        _do(
            layers[index],
            numbers[index],
            kind,
            task,
            index == first,
            starts == PROJECT,
            stops >= TURN,
            starts <= ATTEND,
            shape,
            rows,
            tasks,
            scratch,
            group,
            lanes,
            dots,
            threads,
            unpacked,
        )
        if take(counters, DONE) == count - 1:
            publish(counters, DONE, 0)
            publish(counters, NEXT, (phase + 1) << PHASE_BITS)


@compiled()
def _product(layer: Int64, which: int) -> Int64:
    return layer[which * PRODUCT_FIELDS : (which + 1) * PRODUCT_FIELDS]


@compiled()
def _products(layer: Int64, first: int, last: int) -> Int64:
    fields = layer[first * PRODUCT_FIELDS : (last + 1) * PRODUCT_FIELDS]
    return fields.reshape(last + 1 - first, PRODUCT_FIELDS)


@compiled()
def _columns(layer: Int64) -> Any:
    """Return how many columns the results of a layer's widest matrix product take, of all its products except gate and
    up, whose results have memory of their own."""
    most = max(end_of(_product(layer, OUT)), end_of(_product(layer, DOWN)))
    for which in range(Q, V + 1):
        most = max(most, end_of(_product(layer, which)))
    return most


# This is not inside `run`: numba takes writes of a parallel function to a part of a tuple for unused and drops them.
@compiled()
def _begin(rows: Rows, scratch: Scratch) -> None:
    for row in range(len(rows.hidden)):
        for i in range(rows.hidden.shape[1]):
            scratch.hidden[row, i] = widened(rows.hidden[row, i])


@compiled()
def _end(rows: Rows, scratch: Scratch) -> None:
    for row in range(len(rows.hidden)):
        _finish_row(scratch, row)
        for i in range(rows.hidden.shape[1]):
            rows.hidden[row, i] = rounded(scratch.hidden[row, i])


@compiled(parallel=True)
def run(
    layers: Int64,
    numbers: Any,
    first: int,
    last: int,
    begin: int,
    end: int,
    shape: Shape,
    rows: Rows,
    tasks: AttentionTasks,
    group: Constant,
    lanes: Constant,
    dots: Constant,
    threads: int,
) -> None:
    """Run layers first to last - 1. The first one starts with the part `begin`, and the last one ends with the part
    `end`. The parts are PROJECT (norm, products for q, k and v), TURN (rotate, write to the pool), ATTEND, and COMPLETE
    (the rest of the layer). rows: the step's rows, changed in place.

    layers int64 [layers, LAYER_FIELDS]. numbers float64 [layers, 5]: the epsilons of the norms before attention, of
    queries, of keys and after attention, and the scale of attention. group, lanes: tuples whose lengths are the query
    heads per kv head and the vectors per head. dots: of length 1 where products are dot products of bf16 pairs.
    threads: how many there are for calls from this thread.
    """
    count, width = rows.hidden.shape
    parts, dim, layer = len(tasks.row), rows.heads.shape[2], layers[first]
    inputs = max(_product(layer, Q)[INPUTS], _product(layer, OUT)[INPUTS])
    gated = max(_product(layer, DOWN)[INPUTS], end_of(_product(layer, GATE)))  # columns after the outputs are 0
    scratch = Scratch(
        np.empty((count, width), np.float32),
        np.empty((count, width), np.float32),
        np.empty((count, inputs), np.float32),
        np.empty((count, inputs), np.uint16),
        np.empty((count, inputs // GROUP), np.float32),
        np.zeros((count, gated), np.float32),
        np.zeros((count, gated), np.uint16),
        np.zeros((count, gated // GROUP), np.float32),
        np.empty((count, gated), np.float32),
        np.empty((count, _columns(layer)), np.float32),
        np.empty((parts, shape.num_q, dim), np.float32),
        np.empty((parts, shape.num_q, 2), np.float32),
    )
    _begin(rows, scratch)
    counters = np.zeros(COUNTERS, np.int64)
    counters[NEXT] = (first * _PHASES + _begins(begin)) << PHASE_BITS
    for _ in prange(threads):
        _work(
            counters,
            layers,
            numbers,
            first,
            last,
            begin,
            end,
            shape,
            rows,
            tasks,
            scratch,
            group,
            lanes,
            dots,
            threads,
        )
    if end == COMPLETE:
        _end(rows, scratch)
