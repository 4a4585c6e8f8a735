"""Computes causal attention of many query rows in bf16 over paged KV, compiled by numba for CPUs with AVX512_BF16.

Online softmax over blocks of keys, as in FlashAttention-2 (arXiv 2307.08691). The lanes of a vector are query rows. The
rows of all heads of a group are adjacent, so that they share every key and value that is read. Keys are read in place,
a pair of dimensions at a time for all lanes; values are first paired by key, a block at a time. Maximum, sum and
correction of the softmax are computed per lane; nothing is summed across lanes.

Lanes are independent, and blocks of keys begin at multiples of BLOCK in the context. So a row's result depends only on
its query and on the keys and values that it sees. It does not depend on other rows or sequences of the batch, the chunk
it is computed in, or the number of threads. NaN stays NaN, and stays in its row. Memory after the end of a context has
no effect.

Sums are fp32; probabilities are rounded to bf16 before they are multiplied by the values; numbers below 1.2e-38 are 0.

Import this through `reprise.kernels.cpu.available.flash_kernels`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from torch import Tensor

from reprise.kernels.cpu.emit import (
    F32,
    I32,
    I64,
    LANES,
    LOG2_E,
    PAIRS,
    VEC,
    VEC_I8,
    VEC_I32,
    ElementEmit,
    compiled,
    emitted_by,
    intrinsic,
)
from reprise.kernels.views import Bf16, Constant, Fp32, Int32, Int64, Words, as_bf16, as_stream

_Strides = tuple[int, int, int]
_Pools = tuple[Bf16, _Strides, Bf16, _Strides, bool]  # keys and values, and whether they are packed

TILE = 48  # query rows per task: 3 vectors, which with 8 keys or dimensions fill 24 of the 32 registers with sums
BLOCK = 64  # keys between two corrections by the maximum
PAGE = 32  # page sizes are multiples of this, so a run of this many keys lies in one page
_FAR = 1 << 30  # larger than any context: no window


class _Emit(ElementEmit):
    """An emitter for tiles of query rows. Offsets count 32-bit words, or bf16 numbers in a pool."""

    coefficients = (9.58284536e-3, 5.59064599e-2, 2.40240991e-1, 6.93124187e-1, 1.0)  # right to 3e-6: results have 8 bits

    def add_dot(self, target: Any, x: Any, y: Any) -> None:
        """Add to target the sum of each pair's product; x, y are words of two bf16."""
        self.b.store(self.dot(self.b.load(target), x, y), target)

    def rounded_pairs(self, low: Any, high: Any) -> Any:
        """Round to words of two bf16, to nearest and ties to even."""
        both = self.narrowed(low, high)
        order = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
        return self.b.bitcast(self.shuffled(both, both, order), VEC_I32)

    def interleaved(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return x[0] y[0] x[1] y[1] ... in two vectors."""
        count = x.type.count
        order = [i // 2 + i % 2 * count for i in range(2 * count)]
        return self.shuffled(x, y, order[:count]), self.shuffled(x, y, order[count:])

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Transpose 16 vectors of 16."""
        for _ in range(4):  # each pass exchanges one bit of the row number with one of the column number
            rows = [v for i in range(8) for v in self.interleaved(rows[i], rows[i + 8])]
        return rows


_emitted = emitted_by(_Emit)


# --- the parts of a block. w: one thread's memory, as 32-bit words; lanes: vectors per tile ---------------------------


@_emitted
def _pack_queries(
    e: _Emit, q: ir.Value, rows: ir.Value, words: ir.Value, w: ir.Value, to: ir.Value, lanes: int
) -> None:
    """Transpose queries into working memory: w[to + i, lane] = word i of query rows[lane]. A word is two adjacent bf16
    numbers; a query has `words` of them. lanes: vectors of 16 queries."""
    with cgutils.for_range(e.b, I64(lanes)) as vector, cgutils.for_range(e.b, e.b.sdiv(words, I64(LANES))) as loop:
        first, column = e.mul(vector.index, LANES), e.mul(loop.index, LANES)
        taken = []
        for lane in range(LANES):
            row = e.b.load(e.at(rows, first, lane))
            taken.append(e.load(e.at(q, e.b.mul(row, words), column), VEC_I32))
        for i, vector_of_words in enumerate(e.transposed(taken)):
            e.store(vector_of_words, e.at(w, to, first, e.mul(column, lanes * LANES), i * lanes * LANES))


@_emitted
def _unpack(
    e: _Emit,
    pool: ir.Value,
    at: ir.Value,
    step: ir.Value,
    rows: ir.Value,
    chunks: ir.Value,
    w: ir.Value,
    to: ir.Value,
) -> None:
    """Unpack rows of int8, in the format of `packed_heads`, to bf16 [rows, 32 * chunks] from w[to] on. at, step: the
    first row in the pool and the distance of rows, in elements of two bytes."""
    with cgutils.for_range(e.b, rows) as row:
        here = e.at(pool, at, e.b.mul(row.index, step))
        scale = e.splat(e.scale(e.at(here, e.mul(chunks, LANES))))
        with cgutils.for_range(e.b, chunks) as loop:
            first = e.at(here, e.mul(loop.index, LANES))
            halves = [e.load(e.at(first, half * LANES // 2), VEC_I8) for half in (0, 1)]
            low, high = (e.b.fmul(e.b.sitofp(e.b.sext(half, VEC_I32), VEC), scale) for half in halves)
            rounded = e.narrowed(low, high)
            e.store(rounded, e.at(w, to, e.b.mul(row.index, e.mul(chunks, LANES)), e.mul(loop.index, LANES)))


@_emitted
def _pack_values(
    e: _Emit, v: ir.Value, at: ir.Value, row: ir.Value, rows: ir.Value, chunks: ir.Value, w: ir.Value, to: ir.Value
) -> None:
    """Put values of two keys side by side for dot products: word w[to + i, d] = value d of row 2 i, and value d of row
    2 i + 1, both bf16; 0 after an odd last row. at, row: the first row and the distance of rows in v. chunks: of 32
    dimensions."""
    with cgutils.for_range(e.b, e.b.sdiv(e.b.add(rows, I64(1)), I64(2))) as pair:
        even = e.mul(pair.index, 2)
        alone = e.b.icmp_signed("==", e.b.add(even, I64(1)), rows)
        odd = e.b.select(alone, even, e.b.add(even, I64(1)))
        keep = e.splat(e.b.select(alone, I32(0xFFFF), I32(-1)))
        with cgutils.for_range(e.b, chunks) as loop:
            column = e.mul(loop.index, 2 * LANES)
            taken = [e.load(e.at(v, at, e.b.mul(i, row), column), PAIRS) for i in (even, odd)]
            for half, words in enumerate(e.interleaved(*taken)):
                there = e.b.mul(pair.index, e.mul(chunks, 2 * LANES))
                e.store(e.b.and_(e.b.bitcast(words, VEC_I32), keep), e.at(w, to, there, column, half * LANES))


@_emitted
def _scores(
    e: _Emit,
    w: ir.Value,
    q: ir.Value,
    words: ir.Value,
    k: ir.Value,
    at: ir.Value,
    row: ir.Value,
    groups: ir.Value,
    to: ir.Value,
    lanes: int,
) -> None:
    """Compute w[to + t, lane] = key t . query `lane` for `groups` groups of keys, each of 8, or of 16 if `lanes` is 1.
    lanes: vectors of 16 queries. words: pairs of bf16 in a key. q: where w has the queries. at, row: the first key and
    the distance of keys in k."""
    keys, width = 16 if lanes == 1 else 8, lanes * LANES
    with cgutils.for_range(e.b, groups) as group:
        first = e.mul(group.index, keys)
        where = [e.at(k, at, e.b.mul(e.b.add(first, I64(key)), row)) for key in range(keys)]
        sums = [[e.vector() for _ in range(lanes)] for _ in range(keys)]
        with cgutils.for_range(e.b, words) as loop:
            base = e.at(w, q, e.mul(loop.index, width))
            queries = [e.load(e.at(base, lane * LANES), VEC_I32) for lane in range(lanes)]
            for key in range(keys):
                pair = e.splat(e.load(e.at(where[key], e.mul(loop.index, 2)), I32, 2))
                for lane in range(lanes):
                    e.add_dot(sums[key][lane], queries[lane], pair)
        base = e.at(w, to, e.mul(first, width))
        for key in range(keys):
            for lane in range(lanes):
                e.store(e.b.load(sums[key][lane]), e.at(base, key * width + lane * LANES))


@_emitted
def _hide(
    e: _Emit,
    w: ir.Value,
    scores: ir.Value,
    first: ir.Value,
    keys: ir.Value,
    positions: ir.Value,
    window: ir.Value,
    lanes: int,
) -> None:
    """Set the scores of `keys` keys to -inf in the lanes that do not see them. first: index of the first key. A lane
    sees keys up to its own position, at most `window` of them."""
    here = [e.load(e.at(positions, lane * LANES), VEC_I32) for lane in range(lanes)]
    past = [e.b.sub(x, e.splat(e.b.trunc(window, I32))) for x in here]
    with cgutils.for_range(e.b, keys) as loop:
        key = e.splat(e.b.trunc(e.b.add(first, loop.index), I32))
        for lane in range(lanes):
            pointer = e.at(w, scores, e.mul(loop.index, lanes * LANES), lane * LANES)
            seen = e.b.and_(e.b.icmp_signed("<=", key, here[lane]), e.b.icmp_signed(">", key, past[lane]))
            e.store(e.b.select(seen, e.load(pointer), e.splat(float("-inf"))), pointer)


@_emitted
def _soften(
    e: _Emit, w: ir.Value, scores: ir.Value, pairs: ir.Value, scale: ir.Value, stats: ir.Value, lanes: int
) -> None:
    """Replace scores by their weights in the softmax, 2 ** (scale * (score - maximum)), a word holding those of two
    adjacent keys in bf16. From w[stats] on lie each lane's maximum, sum of weights, and correction: the factor by which
    the sums of earlier keys must be multiplied, because the maximum has grown."""
    width = lanes * LANES
    by, minus = e.splat(scale), e.b.fsub(F32(0.0), scale)
    old = [e.load(e.at(w, stats, lane * LANES)) for lane in range(lanes)]
    tops = [e.vector(top) for top in old]
    with cgutils.for_range(e.b, pairs) as loop:
        base = e.at(w, scores, e.mul(loop.index, 2 * width))
        for i in range(2 * lanes):
            top = tops[i % lanes]
            e.b.store(e.larger(e.load(e.at(base, i * LANES)), e.b.load(top)), top)
    nothing = e.splat(float("-inf"))
    shift = []
    for lane, top in enumerate(map(e.b.load, tops)):
        e.store(top, e.at(w, stats, lane * LANES))
        # While everything is hidden, the maximum may be any number except -inf, which would give NaN.
        shift.append(e.b.fmul(e.b.select(e.b.fcmp_ordered("==", top, nothing), e.splat(0.0), top), e.splat(minus)))
        correction = e.exp2(e.fma(old[lane], by, shift[lane]))
        # Exactly 1 if the maximum is unchanged: the product in `shift` is rounded, that in the sum is not. Otherwise
        # one more block of hidden keys, which the last row of a tile sees, would change the other rows.
        unchanged = e.b.fcmp_ordered("==", old[lane], top)
        correction = e.b.select(unchanged, e.splat(1.0), correction)
        e.store(correction, e.at(w, stats, 2 * width + lane * LANES))
    sums = [e.vector() for _ in range(lanes)]
    with cgutils.for_range(e.b, pairs) as loop:
        base, to = e.at(w, scores, e.mul(loop.index, 2 * width)), e.at(w, scores, e.mul(loop.index, width))
        rows = [[e.load(e.at(base, half * width + lane * LANES)) for half in (0, 1)] for lane in range(lanes)]
        for lane in range(lanes):
            low, high = (e.exp2(e.fma(x, by, shift[lane])) for x in rows[lane])
            e.b.store(e.b.fadd(e.b.fadd(e.b.load(sums[lane]), low), high), sums[lane])
            e.store(e.rounded_pairs(low, high), e.at(to, lane * LANES))
    for lane in range(lanes):
        pointer, correction = e.at(w, stats, width + lane * LANES), e.at(w, stats, 2 * width + lane * LANES)
        e.store(e.fma(e.load(pointer), e.load(correction), e.b.load(sums[lane])), pointer)


@_emitted
def _mix(
    e: _Emit,
    w: ir.Value,
    weights: ir.Value,
    values: ir.Value,
    pairs: ir.Value,
    dims: ir.Value,
    stats: ir.Value,
    to: ir.Value,
    lanes: int,
) -> None:
    """Add values to the running results: w[to + d, lane] = its old value * correction + the sum over keys of weight *
    value. The correction, in w[stats], is the factor by which a new maximum of the scores rescales earlier sums."""
    step, width = 16 if lanes == 1 else 8, lanes * LANES
    corrections = [e.load(e.at(w, stats, 2 * width + lane * LANES)) for lane in range(lanes)]
    with cgutils.for_range(e.b, e.b.sdiv(dims, I64(step))) as loop:
        first = e.mul(loop.index, step)
        base = e.at(w, to, e.mul(first, width))
        places = [[e.at(base, d * width + lane * LANES) for lane in range(lanes)] for d in range(step)]
        sums = [[e.vector(e.b.fmul(e.load(p), c)) for p, c in zip(row, corrections, strict=True)] for row in places]
        with cgutils.for_range(e.b, pairs) as pair:
            here = e.at(w, weights, e.mul(pair.index, width))
            weight = [e.load(e.at(here, lane * LANES), VEC_I32) for lane in range(lanes)]
            there = e.at(w, values, e.b.mul(pair.index, dims), first)
            for d in range(step):
                value = e.splat(e.load(e.at(there, d), I32))
                for lane in range(lanes):
                    e.add_dot(sums[d][lane], weight[lane], value)
        for row, slots in zip(places, sums, strict=True):
            for pointer, slot in zip(row, slots, strict=True):
                e.store(e.b.load(slot), pointer)


@_emitted
def _finish(
    e: _Emit,
    w: ir.Value,
    mixed: ir.Value,
    stats: ir.Value,
    words: ir.Value,
    out: ir.Value,
    rows: ir.Value,
    lanes: int,
) -> None:
    """Set out[rows[lane]] = the mixed values divided by the sum of weights."""
    width = lanes * LANES
    with cgutils.for_range(e.b, I64(lanes)) as vector, cgutils.for_range(e.b, e.b.sdiv(words, I64(LANES))) as loop:
        first, column = e.mul(vector.index, LANES), e.mul(loop.index, LANES)
        share = e.b.fdiv(e.splat(1.0), e.load(e.at(w, stats, width, first)))
        taken = []
        for i in range(LANES):
            base = e.at(w, mixed, first, e.mul(column, 2 * width), i * 2 * width)
            pair = [e.b.fmul(e.load(e.at(base, half * width)), share) for half in (0, 1)]
            taken.append(e.rounded_pairs(*pair))
        for lane, vector_of_words in enumerate(e.transposed(taken)):
            row = e.b.load(e.at(rows, first, lane))
            e.store(vector_of_words, e.at(out, e.b.mul(row, words), column))


@_emitted
def _fill(e: _Emit, w: ir.Value, at: ir.Value, vectors: ir.Value, value: ir.Value) -> None:
    with cgutils.for_range(e.b, vectors) as loop:
        e.store(e.splat(value), e.at(w, at, e.mul(loop.index, LANES)))


@intrinsic
def _next(_: Any, counter: types.Type) -> Any:
    """Return counter[0] and increment it atomically, so that every thread gets another number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, I64(1), "monotonic")

    return types.int64(counter), generate


# --- compiled ---------------------------------------------------------------------------------------------------------


@compiled()
def _guard(
    words: Words, values: int, pairs: int, dims: int, first: int, positions: Int32, window: int, w: Fp32, to: int
) -> None:
    """Replace values that are not finite by 0 in the working memory, and add them to the results of the lanes (query
    rows) that see their keys. A value that a lane must not see would otherwise be multiplied by a weight of 0, which
    gives NaN.

    words: w as integers. values: where the values of `pairs` pairs of keys lie in it, `dims` words a pair. first: index
    of the first key. positions: of each lane. window: how many keys a lane sees at most, the one at its position
    included. to: where w has the results.
    """
    width, odd = len(positions), 0
    for i in range(values, values + pairs * dims):
        word = words[i]
        odd |= ((word & 0x7F80) == 0x7F80) | ((word & 0x7F800000) == 0x7F800000)
    if not odd:
        return
    for pair in range(pairs):
        for d in range(dims):
            for half in range(2):
                word = words[values + pair * dims + d]
                part = np.uint32(0xFFFF0000) if half else np.uint32(0xFFFF)
                if (word & part & 0x7F807F80) == (part & 0x7F807F80):
                    words[values + pair * dims + d] = word & ~part
                    value = np.float32(np.nan) if word & part & 0x007F007F else np.float32(np.inf)
                    if word & part & 0x80008000:
                        value = -value
                    key = first + 2 * pair + half
                    for lane in range(width):
                        if positions[lane] - window < key <= positions[lane]:
                            w[to + d * width + lane] += value


@compiled(error_model="numpy")
def _tile(
    q: Words,
    rows: Int64,
    positions: Int32,
    pools: _Pools,
    pages: Int32,
    page_size: int,
    span: tuple[int, int, int],
    window: int,
    scale: np.float32,
    w: Fp32,
    out: Words,
    lanes: Constant,
) -> None:
    """Compute attention for one tile, up to TILE query rows: queries rows[lane] at positions[lane]. span: (first key,
    key after the last one, kv head) of the sequence with these pages. window: keys that a query sees. w: working
    memory. lanes: a tuple whose length is the vectors of 16 queries."""
    k, k_strides, v, v_strides, is_packed = pools
    begin, end, head = span
    k_words, v_words = q.shape[2], out.shape[2]
    width = len(lanes) * LANES
    at_q, at_s = 0, k_words * width
    at_v = at_s + BLOCK * width
    at_o = at_v + BLOCK // 2 * 2 * v_words
    stats = at_o + 2 * v_words * width
    # Where rows of int8 are unpacked, some at a time.
    plain = stats + 3 * width
    unpacked = w.view(np.uint16)[2 * plain :]
    _pack_queries(q, rows, k_words, w, at_q, lanes)
    _fill(w, at_o, 2 * v_words * len(lanes), np.float32(0.0))
    _fill(w, stats, len(lanes), np.float32(-np.inf))
    _fill(w, stats + width, len(lanes), np.float32(0.0))
    together = 16 if len(lanes) == 1 else 8
    for first in range(begin // BLOCK * BLOCK, end, BLOCK):
        keys = min(BLOCK, end - first)
        pairs = (keys + 1) // 2
        for part in range(0, keys, PAGE):
            page, place = pages[(first + part) // page_size], (first + part) % page_size
            count = min(PAGE, keys - part)
            at = page * k_strides[0] + place * k_strides[1] + head * k_strides[2]
            groups = (count + together - 1) // together
            to = at_s + part * width
            if is_packed:
                _unpack(k, at, k_strides[1], count, k_words // LANES, w, plain)
                _scores(w, at_q, k_words, unpacked, 0, 2 * k_words, groups, to, lanes)
            else:
                _scores(w, at_q, k_words, k, at, k_strides[1], groups, to, lanes)
            at = page * v_strides[0] + place * v_strides[1] + head * v_strides[2]
            to = at_v + part // 2 * 2 * v_words
            if is_packed:
                _unpack(v, at, v_strides[1], count, v_words // LANES, w, plain)
                _pack_values(unpacked, 0, 2 * v_words, count, v_words // LANES, w, to)
            else:
                _pack_values(v, at, v_strides[1], count, v_words // LANES, w, to)
        if first + 2 * pairs - 1 > positions[0] or first <= positions[width - 1] - window:
            _hide(w, at_s, first, 2 * pairs, positions, window, lanes)
            _guard(w.view(np.uint32), at_v, pairs, 2 * v_words, first, positions[:width], window, w, at_o)
        _soften(w, at_s, pairs, scale, stats, lanes)
        _mix(w, at_s, at_v, pairs, 2 * v_words, stats, at_o, lanes)
    _finish(w, at_o, stats, v_words, out, rows, lanes)


@compiled(error_model="numpy")
def _work(
    q: Words,
    pools: _Pools,
    table: Int32,
    page_size: int,
    tasks: Int64,
    queue: Int64,
    heads: int,
    window: int,
    scale: np.float32,
    w: Fp32,
    out: Words,
) -> None:
    """Run the loop of one thread: take tiles that no thread has begun, until none are left."""
    rows, positions = np.empty(TILE, np.int64), np.empty(TILE, np.int32)
    group = q.shape[1] // heads
    while True:
        task = _next(queue)
        if task >= len(tasks):
            break
        sequence, query, position, begin, end, head = tasks[task]
        for lane in range(TILE):
            at = min(begin + lane, end - 1)  # spare lanes repeat the last row
            rows[lane] = (query + at // group) * q.shape[1] + head * group + at % group
            positions[lane] = position + at // group
        span = (max(0, position + begin // group - window + 1), position + (end - 1) // group + 1, head)
        rest = (q, rows, positions, pools, table[sequence], page_size, span, window, scale, w, out)
        if end - begin > 2 * LANES:
            _tile(*rest, (0, 0, 0))
        elif end - begin > LANES:
            _tile(*rest, (0, 0))
        else:
            _tile(*rest, (0,))


@compiled(parallel=True, error_model="numpy")
def _attend(
    q: Words,
    k: Bf16,
    k_strides: _Strides,
    v: Bf16,
    v_strides: _Strides,
    table: Int32,
    page_size: int,
    tasks: Int64,
    queue: Int64,
    heads: int,
    is_packed: bool,
    window: int,
    scale: np.float32,
    memory: Fp32,
    out: Words,
) -> None:
    for thread in prange(len(memory)):
        pools = (k, k_strides, v, v_strides, is_packed)
        _work(q, pools, table, page_size, tasks, queue, heads, window, scale, memory[thread], out)


def plan(query_lens: Sequence[int], context_lens: Sequence[int], group: int, heads: int, least: int) -> np.ndarray:
    """Return the tasks of one step's attention, int64 [tasks, 6]: sequence; index in the batch of its first token; that
    token's position; first and end of the task's query rows, counted in the sequence as token * group + head in the
    group; kv head. Sequences of fewer tokens than `least` get no tasks."""
    tasks = []
    query = np.concatenate((np.zeros(1, np.int64), np.cumsum(query_lens)))
    # Long sequences first and the shortest last, so that threads end together; a head's tasks together, so that its
    # keys stay in the caches.
    for sequence in sorted(range(len(query_lens)), key=lambda i: (-context_lens[i], i)):
        rows = query_lens[sequence]
        if rows >= least:
            begin = np.arange(0, rows * group, TILE)[::-1]
            tile = np.empty((len(begin), 6), np.int64)
            tile[:, 0], tile[:, 1], tile[:, 2] = sequence, query[sequence], context_lens[sequence] - rows
            tile[:, 3], tile[:, 4] = begin, np.minimum(begin + TILE, rows * group)
            for head in range(heads):
                tile[:, 5] = head
                tasks.append(tile.copy())
    return np.concatenate(tasks) if tasks else np.empty((0, 6), np.int64)


def memory(threads: int, k_dim: int, v_dim: int) -> Tensor:
    """Allocate the working memory of `attend`, a row for each thread."""
    words = k_dim // 2 * TILE + BLOCK * TILE + BLOCK // 2 * v_dim + v_dim * TILE + 3 * TILE
    words += PAGE * max(k_dim, v_dim) // 2
    return torch.empty(threads, -(-words // LANES) * LANES)  # torch aligns it to cache lines


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_packed: bool,
    table: Tensor,
    tasks: np.ndarray,
    window: int | None,
    scale: float,
    w: Tensor,
    out: Tensor,
) -> None:
    """Compute causal attention of the query rows of `tasks`, and write it to their rows of `out`.
    q, out bf16 [tokens, heads, dim], contiguous; k, v bf16 [pages, page_size, kv heads, dim], with any strides except
    that dim is contiguous, or is_packed: int8 with rows as in `reprise.kernels.cpu.packed_heads`; table int32
    [sequences, pages], contiguous; window: how many keys a row sees, the last of which is its own; w: `memory`. dims
    and page_size are multiples of 32; scale is positive."""
    k, v = as_bf16(k), as_bf16(v)
    pools = (as_stream(k), k.stride()[:3], as_stream(v), v.stride()[:3])
    _attend(
        *(_words(q), *pools, table.numpy(), k.shape[1], tasks, np.zeros(1, np.int64), k.shape[2], is_packed),
        *(_FAR if window is None else window, np.float32(scale * LOG2_E), w.numpy(), _words(out)),
    )


def _words(x: Tensor) -> Words:
    return x.view(torch.uint32).numpy()


def self_test() -> None:
    """Compile everything with the types of later calls, and check the results. Raises an error if anything is wrong."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(45, 2, PAGE, generator=generator).bfloat16()  # tiles of three vectors, of two and of one
    k, v = torch.randn(2, 1, 4, PAGE, PAGE, generator=generator).bfloat16().permute(0, 2, 3, 1, 4)
    table, out = torch.tensor([[1, 3, 0], [2, 1, 0]], dtype=torch.int32), torch.empty_like(q)
    lens = ([40, 5], [47, 34])
    attend(q, k, v, False, table, plan(*lens, 2, 1, 1), None, 0.2, memory(1, PAGE, PAGE), out)
    queries, outs = q.float().transpose(0, 1).split(lens[0], dim=1), out.float().transpose(0, 1).split(lens[0], dim=1)
    for query, got, pages, rows, context in zip(queries, outs, table.long(), *lens, strict=True):
        keys, values = (pool[pages].float().reshape(-1, PAGE)[:context] for pool in (k, v))
        hidden = torch.ones(rows, context, dtype=torch.bool).triu(context - rows + 1)
        weights = torch.softmax((query @ keys.T * 0.2).masked_fill(hidden, -torch.inf), dim=-1)
        if not torch.allclose(got, weights @ values, rtol=2**-6, atol=2**-6):
            raise RuntimeError("compiled attention of many rows is wrong")
