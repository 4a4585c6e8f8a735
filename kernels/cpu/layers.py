"""Computes runs of decoder layers for a few rows, which is what a decode step of a few streams has, in one compiled
call.

A run is a sequence of phases, and a phase a number of tasks. Threads enter once and stay: they take tasks from a
counter, and the thread that finishes a phase's last task opens the next phase. Threads wait only for tasks that have
been taken, never for a thread. So a thread that comes late, or that the system sets aside, delays the others only if it
has a task.

Sums are fp32; the inputs of a product are rounded to bf16 where dot products of pairs multiply them. The order of a sum
depends only on the row it belongs to, not on other rows of the batch or the number of threads. NaN stays NaN.

Callers import it from `reprise.kernels.cpu.decode`.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, prange, types
from numba.core import cgutils

from reprise.kernels.cpu.attend import AttentionTasks, Pool, attend_part, merge_parts
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
    PRODUCT_FIELDS,
    SCALES,
    SIZE,
    WITH_LOWS,
    Place,
    call_kernel,
)
from reprise.kernels.cpu.emit import (
    I64,
    LANES,
    LOG2_E,
    Emit,
    bf16_at,
    bytes_at,
    compiled,
    emitted,
    emitted_value,
    fp32_at,
    half_at,
    rounded,
    widened,
)
from reprise.kernels.cpu.packed_heads import pack_head
from reprise.kernels.packed import TABLES, ZERO
from reprise.kernels.views import Bf16, Constant, Fp32, Int32, Int64

_E2M1 = np.array(TABLES["e2m1"], np.float32)

# The parts of a layer at which a call may begin or end.
PROJECT, TURN, ATTEND, COMPLETE = range(4)

_Q, _K, _V, _OUT, _GATE, _UP, _DOWN = range(7)
LAYER_PRODUCTS = 7  # keys and values may be part of queries' product, and have no kernel then
_NORMS = LAYER_PRODUCTS * PRODUCT_FIELDS
_INPUT_NORM, _Q_NORM, _K_NORM, _POST_NORM, _K_POOL, _V_POOL, _SAVED = range(_NORMS, _NORMS + 7)
LAYER_FIELDS = _NORMS + 7
"""Fields of a layer: seven products, four norms' weights (fp32; 0: none), the first key and value in HBM, and the first
slot where rows are saved (0: nowhere)."""

_YIELD_SPINS = 2_000  # how often a thread looks for the next phase before it lets others run
_HEADS_TOGETHER = 4  # heads that one task rotates


class Shape(NamedTuple):
    """The properties that all layers of a run share. Widths in numbers, strides in bytes."""

    num_q: int
    num_k: int
    page_size: int
    k_page: int
    k_row: int
    k_head: int
    v_page: int
    v_row: int
    v_head: int
    is_packed: bool  # whether keys and values in HBM are as in `packed_heads`
    slot: int  # bytes of a slot where rows are saved
    slot_values: int  # bytes of a slot's keys


# --- threads ----------------------------------------------------------------------------------------------------------


@emitted_value(types.int64)
def _take(e: Emit, counters: ir.Value, at: ir.Value) -> Any:
    """Add one to a counter and return the value that it had before."""
    pointer = e.b.bitcast(e.at(counters, e.mul(at, 8)), I64.as_pointer())
    return e.b.atomic_rmw("add", pointer, I64(1), "seq_cst")


@emitted_value(types.int64)
def _look(e: Emit, counters: ir.Value, at: ir.Value) -> Any:
    return e.b.load_atomic(e.b.bitcast(e.at(counters, e.mul(at, 8)), I64.as_pointer()), "seq_cst", 8)


@emitted
def _publish(e: Emit, counters: ir.Value, at: ir.Value, value: ir.Value) -> None:
    e.b.store_atomic(value, e.b.bitcast(e.at(counters, e.mul(at, 8)), I64.as_pointer()), "seq_cst", 8)


@emitted
def _pause(e: Emit) -> None:
    e.call("llvm.x86.sse2.pause", ir.VoidType())


@emitted
def _yield(e: Emit) -> None:
    e.call("sched_yield", ir.IntType(32))


_NEXT, _DONE = 0, 8  # places in two cache lines: the phase with its next task, and how many of its tasks are done
_COUNTERS = 16
_PHASE_BITS = 32  # the upper half of the counter of tasks is the phase


@compiled()
def _wait_for(counters: Int64, phase: int) -> None:
    """Wait until all tasks of a phase (a stage of a layer's computation) have ended."""
    spins = 0
    while _look(counters, _NEXT) >> _PHASE_BITS == phase:
        _pause()
        spins += 1
        if spins > _YIELD_SPINS:
            _yield()


# --- parts of a layer -------------------------------------------------------------------------------------------------


@emitted
def gate_in_place(e: Emit, gate: ir.Value, up: ir.Value, vectors: ir.Value) -> None:
    """Compute silu(gate) * up in place of gate, both fp32. vectors: how many vectors of 16 numbers."""
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(gate, e.mul(loop.index, LANES * 4))
        e.store(e.b.fmul(e.swish(e.load(here)), e.load(e.at(up, e.mul(loop.index, LANES * 4)))), here)


@compiled(fastmath={"reassoc", "contract"})
def _inverse_rms(x: Fp32, eps: float) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    inverse: np.float32 = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + np.float32(eps))
    return inverse


@compiled(fastmath={"reassoc", "contract"})
def _sum(x: Fp32) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


class Inputs(NamedTuple):
    """The operands of matrix products: rows in fp32 (`wide`), rows in bf16 (`narrow`), and the sum of each group of
    inputs. Products read `narrow` if the processor has dot products of bf16 pairs, else `wide`."""

    wide: Fp32
    narrow: Bf16
    sums: Fp32


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
    """Prepare a row, whose numbers are in `x.wide`, for products. The numbers after `width` become 0."""
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
    """Return the column after a matrix product's last block. Several products write into one array of rows; `product`
    describes one of them, also its first column there."""
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
    """Return the addresses that a kernel for one block needs: of all rows of inputs, and of its outputs. out fp32
    [rows, columns]: the array of all outputs, from the block's first column on."""
    sums, sums_row, out_at, out_row = x.sums.ctypes.data, x.sums.strides[0], out.ctypes.data, out.strides[0]
    if len(dots):
        return Place(len(out), x.narrow.ctypes.data, x.narrow.strides[0], sums, sums_row, out_at, out_row)
    return Place(len(out), x.wide.ctypes.data, x.wide.strides[0], sums, sums_row, out_at, out_row)


@compiled()
def _multiply(products: Int64, task: int, chunk: int, x: Inputs, dots: Constant, out: Fp32, scratch: Bf16) -> None:
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
def _multiply_gated(
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


@compiled()
def _rotate(x: Bf16, cos: Bf16, sin: Bf16, out: Bf16) -> None:
    """Rotate exactly as torch does in bf16, bit for bit, because keys rotated after loading must be the same."""
    half = len(cos) // 2
    for d in range(half):
        low, high = widened(x[d]), widened(x[half + d])
        a, b = widened(rounded(low * widened(cos[d]))), widened(rounded(high * widened(cos[half + d])))
        out[d] = rounded(a - high * widened(sin[d]))
        out[half + d] = rounded(b + low * widened(sin[half + d]))


@compiled()
def _settle_head(y: Fp32, norm: int, eps: float, out: Bf16) -> None:
    """Normalise the numbers y of one head if the layer has a norm for it, and round them to bf16. norm: address of the
    norm's weights, 0 if there is none."""
    scale = np.float32(1.0)
    if norm:
        scale = _inverse_rms(y, eps)
        weight = carray(fp32_at(norm), (len(y),), np.float32)
        for d in range(len(y)):
            out[d] = rounded(y[d] * (scale * weight[d]))
    else:
        for d in range(len(y)):
            out[d] = rounded(y[d])


@compiled()
def _turn_head(
    shape: Shape,
    layer: Int64,
    row: int,
    head: int,
    x: Bf16,
    cos: Bf16,
    sin: Bf16,
    slot: int,
    spots: Int64,
    scale: np.float32,
    q: Fp32,
) -> None:
    """Write one head of one row to where attention reads it: a query to `q`, rotated and scaled; a key, rotated, or a
    value to its slot of the pool. Before that, save a key or value un-rotated to the block and row in `spots`. head:
    counts through the heads of queries, keys and values."""
    dim = len(x)
    key = head - shape.num_q
    if key >= 0 and layer[_SAVED] and len(spots) and spots[row, 0] >= 0:
        at = layer[_SAVED] + spots[row, 0] * shape.slot + spots[row, 1] * shape.num_k * dim * 2
        if key >= shape.num_k:
            at += shape.slot_values - shape.num_k * dim * 2
        target = carray(bf16_at(at + key * dim * 2), (dim,), np.uint16)
        for d in range(dim):
            target[d] = x[d]
    if key < 0:
        turned = np.empty(dim, np.uint16)
        _rotate(x, cos, sin, turned)
        for d in range(dim):
            q[row, head, d] = widened(turned[d]) * np.float32(scale * LOG2_E)
        return
    page, place = slot // shape.page_size, slot % shape.page_size
    if key < shape.num_k:
        at = layer[_K_POOL] + page * shape.k_page + place * shape.k_row + key * shape.k_head
        if shape.is_packed:
            turned = np.empty(dim, np.uint16)
            _rotate(x, cos, sin, turned)
            pack_head(turned, at)
        else:
            _rotate(x, cos, sin, carray(bf16_at(at), (dim,), np.uint16))
    else:
        at = layer[_V_POOL] + page * shape.v_page + place * shape.v_row + (key - shape.num_k) * shape.v_head
        if shape.is_packed:
            pack_head(x, at)
            return
        target = carray(bf16_at(at), (dim,), np.uint16)
        for d in range(dim):
            target[d] = x[d]


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
        return blocks_of(_product(layer, _Q)) + blocks_of(_product(layer, _K)) + blocks_of(_product(layer, _V))
    if kind == _OUTPUT:
        return blocks_of(_product(layer, _OUT))
    return blocks_of(_product(layer, _GATE if kind == _GATED else _DOWN))


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
    scale = _inverse_rms(hidden, eps)
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
        _normalise(x, task, scratch.hidden[task], layer[_INPUT_NORM], numbers[0], dots)
    elif kind == _HEADS:
        heads = rows.heads.shape[1]
        last = min((task + 1) * _HEADS_TOGETHER, len(rows.heads) * heads)
        for place in range(task * _HEADS_TOGETHER, last):
            row, head = place // heads, place % heads
            out = rows.heads[row, head]
            if settles:
                norm, eps = 0, 0.0
                if head < shape.num_q:
                    norm, eps = layer[_Q_NORM], numbers[1]
                elif head < shape.num_q + shape.num_k:
                    norm, eps = layer[_K_NORM], numbers[2]
                _settle_head(scratch.made[row, head * dim : (head + 1) * dim], norm, eps, out)
            if turns:
                cos, sin, slot = rows.cos[row], rows.sin[row], rows.slots[row]
                _turn_head(shape, layer, row, head, out, cos, sin, slot, rows.spots, np.float32(numbers[4]), rows.q)
    elif kind == _ATTEND:
        part, kv_head = task // shape.num_k, task % shape.num_k
        row, head = tasks.row[part], kv_head * len(group)
        attend_part(
            rows.q[row, head].ctypes.data,
            Pool(layer[_K_POOL], shape.k_page, shape.k_row, shape.k_head, shape.is_packed),
            Pool(layer[_V_POOL], shape.v_page, shape.v_row, shape.v_head, shape.is_packed),
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
        _normalise(x, task, middle, layer[_POST_NORM], numbers[3], dots)
    else:
        chunk = _chunk(_num_blocks(layer, kind), threads)
        gates = Inputs(scratch.gates, scratch.narrow_gates, scratch.sums_of_gates)
        if kind == _PROJECT:
            _multiply(_products(layer, _Q, _V), task, chunk, x, dots, scratch.made, unpacked)
        elif kind == _OUTPUT:
            _multiply(_products(layer, _OUT, _OUT), task, chunk, x, dots, scratch.made, unpacked)
        elif kind == _GATED:
            _multiply_gated(_products(layer, _GATE, _UP), task, chunk, x, dots, scratch.ups, gates, unpacked)
        else:
            _multiply(_products(layer, _DOWN, _DOWN), task, chunk, gates, dots, scratch.made, unpacked)


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
        ticket = _take(counters, _NEXT)
        phase, task = ticket >> _PHASE_BITS, ticket & ((1 << _PHASE_BITS) - 1)
        if phase >= end_phase:
            return
        index, kind = phase // _PHASES, phase % _PHASES
        count = _num_tasks(layers[index], kind, rows, len(tasks.row), shape.num_k, threads)
        if task >= count:
            _wait_for(counters, phase)
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
        if _take(counters, _DONE) == count - 1:
            _publish(counters, _DONE, 0)
            _publish(counters, _NEXT, (phase + 1) << _PHASE_BITS)


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
    most = max(end_of(_product(layer, _OUT)), end_of(_product(layer, _DOWN)))
    for which in range(_Q, _V + 1):
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
    inputs = max(_product(layer, _Q)[INPUTS], _product(layer, _OUT)[INPUTS])
    gated = max(_product(layer, _DOWN)[INPUTS], end_of(_product(layer, _GATE)))  # columns after the outputs are 0
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
    counters = np.zeros(_COUNTERS, np.int64)
    counters[_NEXT] = (first * _PHASES + _begins(begin)) << _PHASE_BITS
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
