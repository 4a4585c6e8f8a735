"""Computes attention of single query rows in bf16 to few rows of their contexts, compiled by numba for CPUs with
AVX-512.

An index holds partial keys: some pairs of dimensions of every rotated key, 32 keys of a page side by side, so that
scores are sums along lanes. `choose` brings the index up to date, scores all rows of a context by their partial keys
and finds the strongest rows; `attend` reads the keys and values of the chosen rows alone. Sums are fp32. The choice and
the result for a row depend on its own context alone, not on other rows of the batch or on the number of threads.

Import this through `reprise.kernels.cpu.available.select_kernels`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from reprise.kernels.cpu.emit import (
    I16,
    I32,
    I64,
    LANES,
    VEC_I32,
    ElementEmit,
    compiled,
    emitted_by,
    emitted_value,
)
from reprise.kernels.views import Bf16, Constant, Fp32, Int32, Int64, Words

SIDE_BY_SIDE = 32  # keys of an index entry; page sizes are multiples of this
ALWAYS = 32  # rows at either end of a context that are always chosen
_AHEAD = 32  # chosen rows that are prefetched before they are read
_RANGE = 64.0  # a row of 2 ** -64 of a head's greatest weight is as good as none
_HALVINGS = 24  # halvings of that range, until rows differ by less than their scores' rounding


def _prefetch_row(e: ElementEmit, pointer: Any, lanes: int) -> None:
    """Prefetch a row of bf16 numbers."""
    for lane in range(0, lanes, 2):
        e.prefetch(e.at(pointer, lane * LANES))


_emitted, _emitted_count = emitted_by(ElementEmit), emitted_value(types.int64, ElementEmit)


# --- choosing ---------------------------------------------------------------------------------------------------------


@_emitted
def _partial_scores(
    e: ElementEmit,
    q: ir.Value,
    group: int,
    pairs: int,
    words: ir.Value,
    at: ir.Value,
    entries: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute out[g, t] = q[g] . partial key t (some pairs of a key's dims) for the keys of some entries of the index,
    of 32 keys each. q fp32 [group, pairs, 2]; words: entries [pairs, 32]."""
    with cgutils.for_range(e.b, entries) as loop:
        base = e.at(words, at, e.mul(loop.index, pairs * SIDE_BY_SIDE))
        places = [(g, half) for g in range(group) for half in range(2)]
        # numbers of one place in four sums where registers suffice, so that a sum seldom waits for the one before
        sums = {place: [e.vector(e.splat(0.0)) for _ in range(2 if group <= 4 else 1)] for place in places}
        for pair in range(pairs):
            both = [e.load(e.at(base, pair * SIDE_BY_SIDE + half * LANES), VEC_I32) for half in range(2)]
            keys = [e.halves(word) for word in both]
            for g in range(group):
                for part in range(2):
                    weight = e.splat(e.b.load(e.at(q, (g * pairs + pair) * 2 + part)))
                    for half in range(2):
                        target = sums[g, half]
                        e.add_product(target[part % len(target)], weight, keys[half][part])
        for g, half in places:
            total = e.b.load(sums[g, half][0])
            for more in sums[g, half][1:]:
                total = e.b.fadd(total, e.b.load(more))
            column = e.b.add(e.mul(loop.index, SIDE_BY_SIDE), I64(half * LANES))
            e.store(total, e.at(out, out_at, column, e.mul(out_row, g)))


@_emitted
def _greatest(e: ElementEmit, x: ir.Value, at: ir.Value, vectors: ir.Value, out: ir.Value, out_at: ir.Value) -> None:
    """Store in out[out_at] the greatest number of x from x[at] on. vectors: how many vectors of 16 numbers."""
    top = e.vector(e.splat(float("-inf")))
    with cgutils.for_range(e.b, vectors) as loop:
        e.b.store(e.larger(e.load(e.at(x, at, e.mul(loop.index, LANES))), e.b.load(top)), top)
    e.b.store(e.reduce("fmax", e.b.load(top)), e.at(out, out_at))


@_emitted
def _strongest_head(
    e: ElementEmit, x: ir.Value, row: ir.Value, group: int, tops: ir.Value, vectors: ir.Value, out: ir.Value
) -> None:
    """Compute out[t] = the greatest x[g, t] - tops[g] of all query heads g. row: elements of x from head to head. tops:
    each head's greatest score. vectors: of 16 numbers in a row."""
    with cgutils.for_range(e.b, vectors) as loop:
        column = e.mul(loop.index, LANES)
        best = None
        for g in range(group):
            value = e.b.fsub(e.load(e.at(x, column, e.mul(row, g))), e.splat(e.b.load(e.at(tops, g))))
            best = value if best is None else e.larger(value, best)
        e.store(best, e.at(out, column))


@_emitted_count
def _count_above(e: ElementEmit, x: ir.Value, vectors: ir.Value, threshold: ir.Value) -> ir.Value:
    """Count the numbers above a threshold."""
    total = e.vector(e.words(0))
    with cgutils.for_range(e.b, vectors) as loop:
        above = e.b.fcmp_ordered(">", e.load(e.at(x, e.mul(loop.index, LANES))), e.splat(threshold))
        e.b.store(e.b.sub(e.b.load(total), e.b.sext(above, VEC_I32)), total)
    return e.b.zext(e.call("llvm.vector.reduce.add.v16i32", I32, e.b.load(total)), I64)


@_emitted_count
def _places_above(
    e: ElementEmit, x: ir.Value, vectors: ir.Value, threshold: ir.Value, out: ir.Value, out_at: ir.Value
) -> ir.Value:
    """Store the places, int32 and ascending, of the numbers above a threshold, and return their count. Up to 15 numbers
    after the last one are overwritten."""
    found = e.vector(I64(0))
    lanes = ir.Constant(VEC_I32, list(range(LANES)))
    with cgutils.for_range(e.b, vectors) as loop:
        first = e.mul(loop.index, LANES)
        above = e.b.fcmp_ordered(">", e.load(e.at(x, first)), e.splat(threshold))
        places = e.b.add(e.splat(e.b.trunc(first, I32)), lanes)
        packed = e.call("llvm.x86.avx512.mask.compress.v16i32", VEC_I32, places, places, above)
        e.store(packed, e.at(out, out_at, e.b.load(found)))
        bits = e.call("llvm.ctpop.i16", I16, e.b.bitcast(above, I16))
        e.b.store(e.b.add(e.b.load(found), e.b.zext(bits, I64)), found)
    return e.b.load(found)


@compiled()
def _index(k: Bf16, pages: Int32, first: int, last: int, head: int, pairs: Int64, words: Words) -> None:
    """Put the keys of context rows first to last - 1 of one kv head into the index of partial keys. pages: the
    context's. pairs: the pairs of dims that the index holds. words: the index."""
    page_size = k.shape[1]
    for at in range(first, last):
        page, row = np.int64(pages[at // page_size]), at % page_size
        entry = words[head, page, row // SIDE_BY_SIDE]
        key = k[page, row, head]
        for pair in range(len(pairs)):
            low, high = np.uint32(key[pairs[pair, 0]]), np.uint32(key[pairs[pair, 1]])
            entry[pair, row % SIDE_BY_SIDE] = low | (high << np.uint32(16))


@compiled()
def _threshold(x: Fp32, vectors: int, most: int) -> np.float32:
    """Return a number that at most `most` of x exceed. At least 31/32 of `most` exceed it, unless fewer have any weight
    (2^-64 and more), or x are too close to each other to be told apart. x: log2 of weights, at most 0; infinite for
    rows that are chosen in any case, which are at most `most`. vectors: of 16 numbers in x."""
    low, high = np.float32(-_RANGE), np.float32(1.0)
    if _count_above(x, vectors, low) <= most:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) * np.float32(0.5)
        count = _count_above(x, vectors, middle)
        if count > most:
            low = middle
        else:
            high = middle
            if count >= most - most // 32:
                break
    return high


@compiled(parallel=True)
def choose(
    q: Fp32,
    k: Bf16,
    table: Int32,
    spans: Int64,
    pairs: Int64,
    words: Words,
    most: Int64,
    group: Constant,
    width: Constant,
    chosen: Int32,
    counts: Int64,
) -> None:
    """Choose context rows for each query row and kv head by partial scores, the products of some dims of query and key.
    A row is ranked by how near its score comes to the greatest one of the same query head, in the head where it comes
    nearest. The first and the last 32 rows are always chosen.

    q fp32 [rows, heads, dim], multiplied by scale * log2(e). k bf16 [pages, page_size, kv_heads, dim], any strides.
    table int32 [rows, pages]. spans int64 [rows, 2]: the first row that is not in the index yet, and the length of the
    context, at least 64. pairs int64 [kv_heads, len(width), 2]: the dims of partial scores. words uint32 [kv_heads,
    pages, page_size / 32, len(width), 32]: the index, which is brought up to date. most int64 [rows]: how many to
    choose, at least 64. group: a tuple whose length is the query heads per kv head. chosen int32 [rows, kv_heads,
    greatest most + 16] and counts int64 [rows, kv_heads] are written: the chosen rows, ascending, and how many they
    are.
    """
    page_size, kv_heads, heads = k.shape[1], k.shape[2], len(group)
    entry = len(width) * SIDE_BY_SIDE
    per_page = page_size // SIDE_BY_SIDE
    for task in prange(len(q) * kv_heads):
        row, head = task // kv_heads, task % kv_heads
        context = spans[row, 1]
        _index(k, table[row], spans[row, 0], context, head, pairs[head], words)
        queries = np.empty((heads, len(width), 2), np.float32)
        for g in range(heads):
            for pair in range(len(width)):
                for part in range(2):
                    queries[g, pair, part] = q[row, head * heads + g, pairs[head, pair, part]]
        pages = (context + page_size - 1) // page_size
        padded = pages * page_size
        scores = np.empty(heads * padded, np.float32)
        page = 0
        while page < pages:
            run = 1
            while page + run < pages and table[row, page + run] == table[row, page] + run:
                run += 1
            at = (head * words.shape[1] + np.int64(table[row, page])) * per_page * entry
            _partial_scores(queries, group, width, words, at, run * per_page, scores, page * page_size, padded)
            page += run
        tops, vectors = np.empty(heads, np.float32), padded // LANES
        for g in range(heads):
            scores[g * padded + context : (g + 1) * padded] = -np.inf
            _greatest(scores, g * padded, vectors, tops, g)
        weight = np.empty(padded, np.float32)
        _strongest_head(scores, padded, group, tops, vectors, weight)
        weight[:ALWAYS] = np.inf
        weight[context - ALWAYS : context] = np.inf
        threshold = _threshold(weight, vectors, most[row])
        at = (row * kv_heads + head) * chosen.shape[2]
        counts[row, head] = _places_above(weight, vectors, threshold, chosen, at)


# --- attending --------------------------------------------------------------------------------------------------------


@_emitted
def _scores(
    e: ElementEmit,
    q: ir.Value,
    q_at: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    places: ir.Value,
    count: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute out[g, t] = q[g] . the key at places[t]. places int64 [count + 32]."""
    with cgutils.for_range(e.b, count) as loop:
        base = e.at(k, e.b.load(e.at(places, loop.index)))
        _prefetch_row(e, e.at(k, e.b.load(e.at(places, loop.index, _AHEAD))), lanes)
        key = [e.bf16(e.at(base, lane * LANES)) for lane in range(lanes)]
        for g in range(group):
            total = e.splat(0.0)
            for lane in range(lanes):
                total = e.fma(e.load(e.at(q, q_at, (g * lanes + lane) * LANES)), key[lane], total)
            e.b.store(e.reduce("fadd", total), e.at(out, loop.index, e.mul(out_row, g)))


@_emitted
def _soften(e: ElementEmit, scores: ir.Value, at: ir.Value, vectors: ir.Value, stats: ir.Value) -> None:
    """Replace scores by their weights in the softmax, 2 ** (scores - max), and store their sum."""
    top = e.vector(e.splat(float("-inf")))
    with cgutils.for_range(e.b, vectors) as loop:
        e.b.store(e.larger(e.load(e.at(scores, at, e.mul(loop.index, LANES))), e.b.load(top)), top)
    highest = e.splat(e.reduce("fmax", e.b.load(top)))
    total = e.vector(e.splat(0.0))
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(scores, at, e.mul(loop.index, LANES))
        weights = e.exp2(e.b.fsub(e.load(here), highest))
        e.store(weights, here)
        e.b.store(e.b.fadd(e.b.load(total), weights), total)
    e.b.store(e.reduce("fadd", e.b.load(total)), stats)


@_emitted
def _mix(
    e: ElementEmit,
    p: ir.Value,
    p_row: ir.Value,
    group: int,
    lanes: int,
    v: ir.Value,
    places: ir.Value,
    count: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
) -> None:
    """Compute out[g] = sum over t of p[g, t] * the value at places[t]. places int64 [count + 32]."""
    together = max(1, 24 // group)  # keeps the sums in registers
    for first in range(0, lanes, together):
        chunk = range(first, min(lanes, first + together))
        sums = {(g, lane): e.vector(e.splat(0.0)) for g in range(group) for lane in chunk}
        with cgutils.for_range(e.b, count) as loop:
            base = e.at(v, e.b.load(e.at(places, loop.index)))
            if first == 0:
                _prefetch_row(e, e.at(v, e.b.load(e.at(places, loop.index, _AHEAD))), lanes)
            for lane in chunk:
                value = e.bf16(e.at(base, lane * LANES))
                for g in range(group):
                    weight = e.b.load(e.at(p, loop.index, e.mul(p_row, g)))
                    e.add_product(sums[g, lane], e.splat(weight), value)
        for (g, lane), total in sums.items():
            e.store(e.b.load(total), e.at(out, out_at, (g * lanes + lane) * LANES))


@compiled()
def _element(pool: Bf16, pages: Int32, chosen: Int32, head: int, out: Int64) -> None:
    """Store where the rows of a context that `chosen` lists begin in a pool, in elements. The last row's place is
    repeated after it, because the reader looks ahead."""
    page_size = pool.shape[1]
    page_step, row_step, first = pool.strides[0] // 2, pool.strides[1] // 2, head * (pool.strides[2] // 2)
    index, end, place = 0, page_size, first
    for i in range(len(chosen)):
        at = np.int64(chosen[i])
        while at >= end:  # instead of a division
            index, end = index + 1, end + page_size
        place = first + np.int64(pages[index]) * page_step + (at - end + page_size) * row_step
        out[i] = place
    out[len(chosen) :] = place


@compiled(parallel=True)
def attend(
    q: Fp32,
    k: Bf16,
    v: Bf16,
    table: Int32,
    chosen: Int32,
    counts: Int64,
    group: Constant,
    k_lanes: Constant,
    v_lanes: Constant,
    out: Fp32,
) -> None:
    """Compute attention of single rows to chosen rows of their contexts, at least one each. q fp32 [rows, heads,
    k_dim], multiplied by scale * log2(e); k, v bf16 [pages, page_size, kv_heads, dim], with any strides except that dim
    is contiguous; table int32 [rows, pages]; chosen int32 [rows, kv_heads, most], ascending, up to counts int64 [rows,
    kv_heads]; out fp32 [rows, heads, v_dim]. The tuples' lengths are the heads per kv head and the vectors per dim."""
    kv_heads, heads = k.shape[2], len(group)
    k_dim, v_dim = k.shape[3], v.shape[3]
    for task in prange(len(q) * kv_heads):
        row, head = task // kv_heads, task % kv_heads
        count = counts[row, head]
        padded = (count + LANES - 1) // LANES * LANES
        places = np.empty(count + _AHEAD, np.int64)
        scores, total = np.empty(heads * padded, np.float32), np.empty(heads, np.float32)
        first = row * kv_heads * heads + head * heads
        _element(k, table[row], chosen[row, head, :count], head, places)
        _scores(q, first * k_dim, group, k_lanes, k, places, count, scores, padded)
        for g in range(heads):
            scores[g * padded + count : (g + 1) * padded] = -np.inf
            _soften(scores, g * padded, padded // LANES, total[g:])
        _element(v, table[row], chosen[row, head, :count], head, places)
        _mix(scores, padded, group, v_lanes, v, places, count, out, first * v_dim)
        for g in range(heads):
            for d in range(v_dim):
                out[row, head * heads + g, d] /= total[g]


def self_test() -> None:
    """Compile everything with the types of later calls, and check that choosing all rows gives plain attention."""
    rows, pages, page, dim = 1, 3, 32, 16
    rng = np.random.default_rng(0)
    bits = (rng.standard_normal((1, pages, page, dim)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    k = bits.transpose(1, 2, 0, 3)
    wide = (k.astype(np.uint32) << 16).view(np.float32)[[2, 0, 1], :, 0].reshape(-1, dim)
    q = rng.standard_normal((rows, 1, dim)).astype(np.float32)
    table = np.array([[2, 0, 1]], np.int32)
    words = np.zeros((1, pages, 1, 2, SIDE_BY_SIDE), np.uint32)
    dims = np.array([[[0, 8], [3, 11]]], np.int64)
    most, chosen, counts = np.array([90]), np.zeros((rows, 1, 106), np.int32), np.zeros((rows, 1), np.int64)
    choose(q, k, table, np.array([[0, 90]]), dims, words, most, (0,), (0,) * 2, chosen, counts)
    out = np.empty((rows, 1, dim), np.float32)
    attend(q, k, k, table, chosen, counts, (0,), (0,), (0,), out)
    weights = np.exp2(wide[:90] @ q[0, 0])
    want = weights @ wide[:90] / weights.sum()
    if counts[0, 0] != 90 or not np.allclose(out[0, 0], want, rtol=1e-4, atol=1e-4):
        raise RuntimeError("attention to chosen rows is wrong")
