"""Attention of single query rows over paged KV in bf16 or int8, at the speed of memory. Compiled by numba.

A row's context is split into parts of at most PART keys, which threads take as tasks and which are merged by their
maxima and sums. The split depends on the row's own context alone, so its result does too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.emit import F32, LANES, VEC, Emit, compiled, emitted
from kernels.views import Constant, Fp32, Int32, Int64

PART = 512  # keys that one task of attention covers
_NO_WINDOW = 1 << 62
_PREFETCH = 4096  # bytes; needed because the hardware's own prefetch stops at the end of a page
_LINE = 64  # bytes that are fetched together
_AHEAD = 32  # at most this many rows ahead, so that the row is in this run of pages or in the next


class AttentionTasks(NamedTuple):
    """The attention tasks of one step, ordered by row. Fields are int64 [parts], except `starts` [rows + 1]."""

    row: Int64
    first: Int64  # context row of the first key
    keys: Int64
    starts: Int64  # where each row's parts begin


class Pool(NamedTuple):
    """Keys or values of one layer in HBM: the address of the first, and the bytes from one page, row and head to the
    next. Numbers of one head are adjacent. is_packed: they are int8, with their scale behind them, as in
    `kernels.int8_rows`; else bf16."""

    address: int
    page: int
    row: int
    head: int
    is_packed: bool


def plan(contexts: Sequence[int], window: int | None) -> AttentionTasks:
    """Split attention of single rows into tasks."""
    return AttentionTasks(*_plan(np.array(contexts, np.int64), _NO_WINDOW if window is None else window))


@compiled()
def _plan(contexts: Int64, window: int) -> tuple[Int64, Int64, Int64, Int64]:
    starts = np.zeros(len(contexts) + 1, np.int64)
    for row in range(len(contexts)):
        starts[row + 1] = starts[row] + (min(contexts[row], window) + PART - 1) // PART
    rows, firsts, keys = np.empty((3, starts[-1]), np.int64)
    for row in range(len(contexts)):
        first = max(0, contexts[row] - window)
        for part in range(starts[row], starts[row + 1]):
            rows[part], firsts[part], keys[part] = row, first, min(PART, contexts[row] - first)
            first += PART
    return rows, firsts, keys, starts


def _prefetch_row(e: Emit, here: Any, step: Any, index: Any, count: Any, behind: Any, size: int) -> None:
    """Prefetch the row of `size` bytes that is read some rows after `index`, from the run of `count` rows at `here` or
    from the next run."""
    ahead = e.add(index, max(1, min(_AHEAD, _PREFETCH // size)))
    inside = e.b.icmp_signed("<", ahead, count)
    row = e.b.select(inside, ahead, e.b.sub(ahead, count))
    base = e.at(e.b.select(inside, here, behind), e.mul(step, row))
    for place in range(0, size, _LINE):
        e.prefetch(e.at(base, place))


def _emit_scores(
    e: Emit,
    is_packed: bool,
    q: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    behind: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute out[g, t] = q[g] . k[t] for `count` keys. q, out fp32. behind: where the next keys will be read."""
    number = 1 if is_packed else 2  # bytes
    with cgutils.for_range(e.b, count) as loop:
        base = e.at(k, e.mul(k_row, loop.index))
        read = e.int8 if is_packed else e.bf16
        key = [read(e.at(base, lane * LANES * number)) for lane in range(lanes)]
        scale = e.scale(e.at(base, lanes * LANES)) if is_packed else None
        _prefetch_row(e, k, k_row, loop.index, count, behind, lanes * LANES * number)
        for g in range(group):
            total = e.splat(0.0)
            for lane in range(lanes):
                total = e.fma(e.load(e.at(q, (g * lanes + lane) * LANES * 4)), key[lane], total)
            score = e.reduce("fadd", total)
            e.b.store(
                score if scale is None else e.b.fmul(score, scale),
                e.b.bitcast(e.at(out, e.mul(out_row, g), e.mul(loop.index, 4)), F32.as_pointer()),
            )


@emitted
def _scores(
    e: Emit,
    q: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    behind: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """See `_emit_scores`, of keys in bf16."""
    _emit_scores(e, False, q, group, lanes, k, k_row, count, behind, out, out_row)


@emitted
def _packed_scores(
    e: Emit,
    q: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    behind: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """See `_emit_scores`, of keys in int8."""
    _emit_scores(e, True, q, group, lanes, k, k_row, count, behind, out, out_row)


@emitted
def _soften(e: Emit, scores: ir.Value, vectors: ir.Value, stats: ir.Value) -> None:
    """Replace scores by 2 ** (scores - max) and store the maximum and the sum in stats."""
    top = e.vector(ir.Constant(VEC, [float("-inf")] * LANES))
    with cgutils.for_range(e.b, vectors) as loop:
        x, old = e.load(e.at(scores, e.mul(loop.index, LANES * 4))), e.b.load(top)
        e.b.store(e.b.select(e.b.fcmp_ordered(">", x, old), x, old), top)
    highest = e.reduce("fmax", e.b.load(top))
    total = e.vector()
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(scores, e.mul(loop.index, LANES * 4))
        weights = e.exp2(e.b.fsub(e.load(here), e.splat(highest)))
        e.store(weights, here)
        e.b.store(e.b.fadd(e.b.load(total), weights), total)
    for place, value in enumerate((highest, e.reduce("fadd", e.b.load(total)))):
        e.b.store(value, e.b.bitcast(e.at(stats, place * 4), F32.as_pointer()))


def _emit_mix(
    e: Emit,
    is_packed: bool,
    p: ir.Value,
    p_row: ir.Value,
    group: int,
    lanes: int,
    v: ir.Value,
    v_row: ir.Value,
    count: ir.Value,
    behind: ir.Value,
    out: ir.Value,
) -> None:
    """Compute out[g] += sum over t of p[g, t] * v[t]. p, out fp32. behind: where the next values will be read."""
    number = 1 if is_packed else 2  # bytes
    together = max(1, 24 // group)  # keeps the sums in registers
    for first in range(0, lanes, together):
        chunk = range(first, min(lanes, first + together))
        where = {(g, lane): e.at(out, (g * lanes + lane) * LANES * 4) for g in range(group) for lane in chunk}
        sums = {key: e.vector(e.load(pointer)) for key, pointer in where.items()}
        with cgutils.for_range(e.b, count) as loop:
            base = e.at(v, e.mul(v_row, loop.index))
            if first == 0:
                _prefetch_row(e, v, v_row, loop.index, count, behind, lanes * LANES * number)
            weights = [e.load(e.at(p, e.mul(p_row, g), e.mul(loop.index, 4)), F32) for g in range(group)]
            if is_packed:
                scale = e.scale(e.at(base, lanes * LANES))
                weights = [e.b.fmul(weight, scale) for weight in weights]
            for lane in chunk:
                value = (e.int8 if is_packed else e.bf16)(e.at(base, lane * LANES * number))
                for g in range(group):
                    e.add_product(sums[g, lane], e.splat(weights[g]), value)
        for key, pointer in where.items():
            e.store(e.b.load(sums[key]), pointer)


@emitted
def _mix(
    e: Emit,
    p: ir.Value,
    p_row: ir.Value,
    group: int,
    lanes: int,
    v: ir.Value,
    v_row: ir.Value,
    count: ir.Value,
    behind: ir.Value,
    out: ir.Value,
) -> None:
    """See `_emit_mix`, of values in bf16."""
    _emit_mix(e, False, p, p_row, group, lanes, v, v_row, count, behind, out)


@emitted
def _packed_mix(
    e: Emit,
    p: ir.Value,
    p_row: ir.Value,
    group: int,
    lanes: int,
    v: ir.Value,
    v_row: ir.Value,
    count: ir.Value,
    behind: ir.Value,
    out: ir.Value,
) -> None:
    """See `_emit_mix`, of values in int8."""
    _emit_mix(e, True, p, p_row, group, lanes, v, v_row, count, behind, out)


@compiled()
def attend_part(
    q: int,
    k: Pool,
    v: Pool,
    kv_head: int,
    page_size: int,
    table: Int32,
    first: int,
    count: int,
    group: Constant,
    k_lanes: Constant,
    v_lanes: Constant,
    mixed: int,
    stats: int,
) -> None:
    """Attend from one row's query heads of one kv head to a part of its context. q: address of fp32 [group, k_dim],
    multiplied by scale * log2(e); table [pages]; mixed, stats: addresses of fp32 [group, v_dim] and [group, 2]."""
    padded = (count + LANES - 1) // LANES * LANES
    scores = np.empty((len(group), padded), np.float32)
    # Each run: page, row in it, number of rows; adjacent pages form one run. After the last run: where the next part
    # begins.
    runs = np.empty((count // page_size + 3, 3), np.int64)
    num_runs, done = 0, 0
    while done < count:
        index, start = (first + done) // page_size, (first + done) % page_size
        page = np.int64(table[index])
        length = page_size - start
        while length < count - done and table[index + 1] == table[index] + 1:
            length, index = length + page_size, index + 1
        length = min(length, count - done)
        runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = page, start, length
        num_runs, done = num_runs + 1, done + length
    runs[num_runs, 0] = table[min((first + count) // page_size, len(table) - 1)]
    runs[num_runs, 1] = (first + count) % page_size
    row_bytes = padded * 4
    done, at = 0, k.address + runs[0, 0] * k.page + runs[0, 1] * k.row + kv_head * k.head
    for i in range(num_runs):
        behind = k.address + runs[i + 1, 0] * k.page + runs[i + 1, 1] * k.row + kv_head * k.head
        to = scores.ctypes.data + done * 4
        if k.is_packed:
            _packed_scores(q, group, k_lanes, at, k.row, runs[i, 2], behind, to, row_bytes)
        else:
            _scores(q, group, k_lanes, at, k.row, runs[i, 2], behind, to, row_bytes)
        at = behind
        done += runs[i, 2]
    for g in range(len(group)):
        scores[g, count:] = -np.inf
        _soften(scores.ctypes.data + g * row_bytes, padded // LANES, stats + g * 8)
    _clear(mixed, len(group) * len(v_lanes))
    done, at = 0, v.address + runs[0, 0] * v.page + runs[0, 1] * v.row + kv_head * v.head
    for i in range(num_runs):
        behind = v.address + runs[i + 1, 0] * v.page + runs[i + 1, 1] * v.row + kv_head * v.head
        weights = scores.ctypes.data + done * 4
        if v.is_packed:
            _packed_mix(weights, row_bytes, group, v_lanes, at, v.row, runs[i, 2], behind, mixed)
        else:
            _mix(weights, row_bytes, group, v_lanes, at, v.row, runs[i, 2], behind, mixed)
        at = behind
        done += runs[i, 2]


@emitted
def _clear(e: Emit, where: ir.Value, vectors: ir.Value) -> None:
    with cgutils.for_range(e.b, vectors) as loop:
        e.store(e.splat(0.0), e.at(where, e.mul(loop.index, LANES * 4)))


@compiled()
def merge_parts(mixed: Fp32, stats: Fp32, begin: int, end: int, head: int, out: Fp32) -> None:
    """Merge one head's parts begin to end. mixed fp32 [parts, heads, dim]; stats [parts, heads, 2]; out [dim]."""
    top = np.float32(-np.inf)
    for part in range(begin, end):
        if stats[part, head, 0] > top:
            top = stats[part, head, 0]
    total = np.float32(0.0)
    for d in range(len(out)):
        out[d] = np.float32(0.0)
    for part in range(begin, end):
        share = np.float32(np.exp2(stats[part, head, 0] - top))
        total += share * stats[part, head, 1]
        for d in range(len(out)):
            out[d] += share * mixed[part, head, d]
    for d in range(len(out)):
        out[d] /= total
