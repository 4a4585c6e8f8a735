"""Computes attention of single query rows over paged KV in bf16 or packed, at the speed of memory. Compiled by numba.

A row's context is split into parts of at most PART keys, which threads take as tasks and which are merged by their
maxima and sums. The split depends on the row's own context alone, and so does its result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from reprise.kernels.cpu.emit import F32, I8, I16, I32, I64, LANES, VEC, VEC_I16, VEC_I32, Emit, compiled, emitted
from reprise.kernels.views import Constant, Fp32, Int32, Int64

PART = 512  # keys that one task of attention covers
_NO_WINDOW = 1 << 62
_PREFETCH = 4096  # bytes; needed because the hardware's own prefetch stops at the end of a page
_WORD = 16_383  # most of a query as int16, so that 512 products with int8 fit into 32 bits
_BYTES, _WORDS = ir.VectorType(I8, 2 * LANES), ir.VectorType(I16, 2 * LANES)
_LINE = 64  # bytes that are fetched together
_AHEAD = 32  # at most this many rows ahead, so that the row is in this run of pages or in the next


class AttentionTasks(NamedTuple):
    """The attention tasks of one step: parts of rows' contexts, ordered by row. Fields are int64 [parts], except
    `starts` [rows + 1]."""

    row: Int64
    first: Int64  # context row of the first key
    keys: Int64
    starts: Int64  # where each row's parts begin


class Pool(NamedTuple):
    """The keys or values of one layer in HBM: the address of the first number, and the bytes from one page, row and
    head to the next. Numbers of one head are adjacent. is_packed: heads are packed as in
    `reprise.kernels.cpu.packed_heads`; otherwise bf16."""

    address: int
    page: int
    row: int
    head: int
    is_packed: bool


def plan(contexts: Sequence[int], window: int | None) -> AttentionTasks:
    """Split the attention of single query rows into tasks, each with a part of a row's context. contexts: length of
    each row's context. window: only so many of the last rows of a context are read; None: all."""
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


def _prefetch_row(e: Emit, here: Any, step: Any, index: Any, count: Any, next_run: Any, size: int) -> None:
    """Prefetch the row that will be read some rows after row `index`. here: address of a run of `count` adjacent rows,
    which lie `step` bytes apart. next_run: address of the run that is read next, if the row is beyond this one. size:
    bytes."""
    ahead = e.add(index, max(1, min(_AHEAD, _PREFETCH // size)))
    inside = e.b.icmp_signed("<", ahead, count)
    row = e.b.select(inside, ahead, e.b.sub(ahead, count))
    base = e.at(e.b.select(inside, here, next_run), e.mul(step, row))
    for place in range(0, size, _LINE):
        e.prefetch(e.at(base, place))


def _multiplied(
    e: Emit, is_packed: bool, by_words: bool, queries: Any, bases: Sequence[Any], group: int, lanes: int
) -> list[list[Any]]:
    """Return for each of `group` query heads, and for the key at each address of `bases`, a vector whose lanes sum up
    to their dot product. lanes: vectors of 16 numbers in a head. is_packed: keys are int8, otherwise bf16. by_words:
    queries are int16 and the vectors int32; otherwise both are fp32."""
    number, width = (1 if is_packed else 2), (2 if by_words else 1)  # bytes; vectors of a query at once
    totals = [[e.words(0) if by_words else e.splat(0.0)] * len(bases) for _ in range(group)]
    for place in range(0, lanes, width):
        kind = _WORDS if by_words else VEC
        query = [
            e.load(e.at(queries, (g * lanes + place) * LANES * (2 if by_words else 4)), kind) for g in range(group)
        ]
        for n, base in enumerate(bases):
            here = e.at(base, place * LANES * number)
            if by_words:
                key = e.b.sext(e.load(here, _BYTES), _WORDS)
            else:
                key = e.int8(here) if is_packed else e.bf16(here)
            for g in range(group):
                multiply = e.dot_words if by_words else e.added_product
                totals[g][n] = multiply(totals[g][n], query[g], key)
    return totals


def _emit_scores(
    e: Emit,
    is_packed: bool,
    q: ir.Value,
    words: ir.Value,
    scales: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    next_run: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute out[g, t] = q[g] . k[t] for `count` keys. A product's bits do not depend on the place of its key in the
    run.

    q, out: fp32; out_row: bytes from head to head of out. words, scales: the queries as int16, with a factor for each
    head, used where keys are packed as int8. group: query heads. lanes: vectors of 16 numbers in a head. k, k_row:
    address of the first key, and bytes from key to key. next_run: address of the keys that will be read next.
    """
    size = lanes * LANES * (1 if is_packed else 2)
    by_words = is_packed and lanes % 2 == 0 and "+avx512bw" in e.features
    heads = next(n for n in (1, 2, 4, 8, 16) if n >= group)
    keys = LANES // heads  # at once
    query_scales = [e.load(e.at(scales, 4 * g), F32) for g in range(group)] if by_words else []
    of_queries = e.splat(0.0)
    for g, scale in enumerate(query_scales):
        for n in range(keys):
            of_queries = e.b.insert_element(of_queries, scale, I32(g * keys + n))

    def score(first: Any, together: int) -> None:
        """Compute the scores of `together` keys from the key `first` on."""
        index = [e.add(first, n) for n in range(together)]
        bases = [e.at(k, e.mul(k_row, i)) for i in index]
        totals = _multiplied(e, is_packed, by_words, words if by_words else q, bases, group, lanes)
        for i in index:
            _prefetch_row(e, k, k_row, i, count, next_run, size)
        key_scales = [e.scale(e.at(base, size)) for base in bases] if is_packed else []
        if together == 1:
            for g, (total,) in enumerate(totals):
                result = e.sum_lanes(total)
                if by_words:
                    result = e.b.fmul(e.b.sitofp(result, F32), query_scales[g])
                if is_packed:
                    result = e.b.fmul(result, key_scales[0])
                to = e.at(out, e.mul(out_row, g), e.mul(first, 4))
                e.b.store(result, e.b.bitcast(to, F32.as_pointer()))
            return
        spare = totals[0][0]
        result = e.sums([totals[n // keys][n % keys] if n // keys < group else spare for n in range(LANES)])
        if by_words:
            result = e.b.fmul(e.b.sitofp(result, VEC), of_queries)
        if is_packed:
            of_keys = e.splat(0.0)
            for n, scale in enumerate(key_scales):
                of_keys = e.b.insert_element(of_keys, scale, I32(n))
            result = e.b.fmul(result, e.shuffled(of_keys, of_keys, [n % keys for n in range(LANES)]))
        for g in range(group):
            part = e.shuffled(result, result, range(g * keys, (g + 1) * keys))
            e.store(part, e.at(out, e.mul(out_row, g), e.mul(first, 4)))

    whole = e.b.sdiv(count, I64(keys))
    with cgutils.for_range(e.b, whole) as loop:
        score(e.mul(loop.index, keys), keys)
    done = e.mul(whole, keys)
    with cgutils.for_range(e.b, e.b.sub(count, done)) as loop:
        score(e.b.add(done, loop.index), 1)


@emitted
def _scores(
    e: Emit,
    q: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    next_run: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute the scores of keys in bf16, as `_emit_scores` does."""
    _emit_scores(e, False, q, q, q, group, lanes, k, k_row, count, next_run, out, out_row)


@emitted
def _packed_scores(
    e: Emit,
    q: ir.Value,
    words: ir.Value,
    scales: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    next_run: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute the scores of keys in int8, as `_emit_scores` does."""
    _emit_scores(e, True, q, words, scales, group, lanes, k, k_row, count, next_run, out, out_row)


@emitted
def _round_queries(e: Emit, q: ir.Value, group: int, lanes: int, words: ir.Value, scales: ir.Value) -> None:
    """Round queries, fp32 [group, 16 * lanes], to int16 numbers up to 16,383, with a scale for each head: its largest
    number divided by 16,383. A head that is not finite gets a scale of NaN."""
    for g in range(group):
        numbers = [e.load(e.at(q, (g * lanes + lane) * LANES * 4)) for lane in range(lanes)]
        top, total = e.splat(0.0), e.splat(0.0)
        for x in numbers:
            size = e.call("llvm.fabs.v16f32", VEC, x)
            top = e.b.select(e.b.fcmp_ordered(">", size, top), size, top)
            total = e.b.fadd(total, e.b.fmul(x, e.splat(0.0)))  # NaN if one is not finite
        scale = e.b.fdiv(e.reduce("fmax", top), F32(_WORD))
        nothing = e.b.fcmp_ordered("<", scale, F32(2.0**-126))
        inverse = e.splat(e.b.select(nothing, F32(0.0), e.b.fdiv(F32(1.0), scale)))
        check = e.sum_lanes(total)
        e.b.store(e.b.fadd(scale, check), e.b.bitcast(e.at(scales, 4 * g), F32.as_pointer()))
        for lane, x in enumerate(numbers):
            whole = e.call("llvm.rint.v16f32", VEC, e.b.fmul(x, inverse))
            whole = e.b.select(e.b.fcmp_ordered("ord", whole, whole), whole, e.splat(0.0))
            e.store(e.b.trunc(e.b.fptosi(whole, VEC_I32), VEC_I16), e.at(words, (g * lanes + lane) * LANES * 2))


@emitted
def _soften(e: Emit, scores: ir.Value, vectors: ir.Value, stats: ir.Value) -> None:
    """Replace scores by their weights in the softmax, 2 ** (score - maximum). vectors: how many vectors of 16 scores.
    stats: address where the maximum and the sum of the weights are stored, as two fp32 numbers."""
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
    next_run: ir.Value,
    out: ir.Value,
) -> None:
    """Compute out[g] += sum over t of p[g, t] * v[t]. p, out fp32. next_run: address of the values that will be read
    next."""
    number = 1 if is_packed else 2  # bytes
    together = max(1, 24 // group)  # keeps the sums in registers
    for first in range(0, lanes, together):
        chunk = range(first, min(lanes, first + together))
        where = {(g, lane): e.at(out, (g * lanes + lane) * LANES * 4) for g in range(group) for lane in chunk}
        sums = {key: e.vector(e.load(pointer)) for key, pointer in where.items()}
        with cgutils.for_range(e.b, count) as loop:
            base = e.at(v, e.mul(v_row, loop.index))
            if first == 0:
                _prefetch_row(e, v, v_row, loop.index, count, next_run, lanes * LANES * number)
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
    next_run: ir.Value,
    out: ir.Value,
) -> None:
    """Add up values in bf16, as `_emit_mix` does."""
    _emit_mix(e, False, p, p_row, group, lanes, v, v_row, count, next_run, out)


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
    next_run: ir.Value,
    out: ir.Value,
) -> None:
    """Add up values in int8, as `_emit_mix` does."""
    _emit_mix(e, True, p, p_row, group, lanes, v, v_row, count, next_run, out)


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
    """Attend from one row's query heads of one kv head to `count` rows of its context, from row `first` on. q: address
    of fp32 [group, k_dim], multiplied by scale * log2(e). table [pages]: the context's. mixed: address of fp32 [group,
    v_dim]. stats: address of fp32 [group, 2], the greatest score and the sum of weights. group, k_lanes, v_lanes:
    tuples whose lengths are the query heads and the vectors of 16 numbers."""
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
    words, scales = np.empty((len(group), len(k_lanes) * LANES), np.int16), np.empty(len(group), np.float32)
    if k.is_packed:
        _round_queries(q, group, k_lanes, words.ctypes.data, scales.ctypes.data)
    done, at = 0, k.address + runs[0, 0] * k.page + runs[0, 1] * k.row + kv_head * k.head
    for i in range(num_runs):
        next_run = k.address + runs[i + 1, 0] * k.page + runs[i + 1, 1] * k.row + kv_head * k.head
        to = scores.ctypes.data + done * 4
        if k.is_packed:
            _packed_scores(
                q, words.ctypes.data, scales.ctypes.data, group, k_lanes, at, k.row, runs[i, 2], next_run, to, row_bytes
            )
        else:
            _scores(q, group, k_lanes, at, k.row, runs[i, 2], next_run, to, row_bytes)
        at = next_run
        done += runs[i, 2]
    for g in range(len(group)):
        scores[g, count:] = -np.inf
        _soften(scores.ctypes.data + g * row_bytes, padded // LANES, stats + g * 8)
    _clear(mixed, len(group) * len(v_lanes))
    done, at = 0, v.address + runs[0, 0] * v.page + runs[0, 1] * v.row + kv_head * v.head
    for i in range(num_runs):
        next_run = v.address + runs[i + 1, 0] * v.page + runs[i + 1, 1] * v.row + kv_head * v.head
        weights = scores.ctypes.data + done * 4
        if v.is_packed:
            _packed_mix(weights, row_bytes, group, v_lanes, at, v.row, runs[i, 2], next_run, mixed)
        else:
            _mix(weights, row_bytes, group, v_lanes, at, v.row, runs[i, 2], next_run, mixed)
        at = next_run
        done += runs[i, 2]


@emitted
def _clear(e: Emit, where: ir.Value, vectors: ir.Value) -> None:
    with cgutils.for_range(e.b, vectors) as loop:
        e.store(e.splat(0.0), e.at(where, e.mul(loop.index, LANES * 4)))


@compiled()
def merge_parts(mixed: Fp32, stats: Fp32, begin: int, end: int, head: int, out: Fp32) -> None:
    """Merge one head's attention to the parts `begin` to `end` - 1 of a context. mixed fp32 [parts, heads, dim]; stats
    [parts, heads, 2], the greatest score (to the base of 2) and the sum of weights; out [dim]."""
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
