"""Computes attention of single query rows in bf16 to few rows of their contexts, compiled by numba for CPUs with
AVX-512.

An index holds partial keys: some pairs of dimensions of every rotated key, 32 keys of a page side by side, so that
scores are sums along lanes. `choose` brings the index up to date, scores all rows of a context by their partial keys
and finds the strongest rows; `attend` reads the keys and values of the chosen rows alone. Sums are fp32. The choice and
the result for a row depend on its own context alone, not on other rows of the batch or on the number of threads.

Import this through `reprise.kernels.cpu.available.select_kernels`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from reprise.kernels.cpu.emit import compiled, intrinsic
from reprise.kernels.views import Bf16, Constant, Fp32, Int32, Int64, Words

LANES = 16
SIDE_BY_SIDE = 32  # keys of an index entry; page sizes are multiples of this
ALWAYS = 32  # rows at either end of a context that are always chosen
LOG2_E = 1.4426950408889634
_AHEAD = 32  # chosen rows that are prefetched before they are read
_RANGE = 64.0  # a row of 2 ** -64 of a head's greatest weight is as good as none
_HALVINGS = 24  # halvings of that range, until rows differ by less than their scores' rounding

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VEC, _VEC_I16, _WORDS = (ir.VectorType(kind, LANES) for kind in (_F32, _I16, _I32))
_MASK = ir.VectorType(ir.IntType(1), LANES)
# 2 ** r for |r| <= 1/2, to 1e-7
_EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)


class _Emit:
    """Emits vector code into a function that numba compiles. Offsets count elements."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, base: Any, *offsets: Any) -> Any:
        """Return base + the sum of offsets."""
        for offset in offsets:
            base = self.b.gep(base, [_I64(offset) if isinstance(offset, int) else offset])
        return base

    def times(self, x: Any, count: int) -> Any:
        return self.b.mul(x, _I64(count))

    def load(self, pointer: Any, kind: Any = _VEC) -> Any:
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=2 if kind is _VEC_I16 else 4)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def bf16(self, pointer: Any) -> Any:
        """Load 16 bf16 numbers and widen them."""
        return self.lower(self.b.zext(self.load(pointer, _VEC_I16), _WORDS))

    def lower(self, words: Any) -> Any:
        """Widen the bf16 number in the lower half of each word."""
        return self.b.bitcast(self.b.shl(words, ir.Constant(_WORDS, [16] * LANES)), _VEC)

    def upper(self, words: Any) -> Any:
        """Widen the bf16 number in the upper half of each word."""
        return self.b.bitcast(self.b.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES)), _VEC)

    def splat(self, scalar: Any, kind: Any = _VEC) -> Any:
        if isinstance(scalar, (int, float)):
            return ir.Constant(kind, [scalar] * LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))

    def variable(self, value: Any) -> Any:
        """Create a vector that loops may change."""
        return cgutils.alloca_once_value(self.b, value)

    def add_product(self, target: Any, x: Any, y: Any) -> None:
        self.b.store(self.fma(x, y, self.b.load(target)), target)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.b.call(self.declare("llvm.fma.v16f32", _VEC, [_VEC] * 3), [x, y, z])

    def greater(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def reduce(self, name: str, x: Any) -> Any:
        """Reduce the lanes by `fadd` or `fmax`, in a tree."""
        first = [_F32(0.0)] if name == "fadd" else []
        function = self.declare(f"llvm.vector.reduce.{name}.v16f32", _F32, [v.type for v in (*first, x)])
        return self.b.call(function, [*first, x], fastmath=("reassoc",))

    def exp2(self, x: Any) -> Any:
        """Compute 2 ** x for x <= 0; values below the range give 0."""
        low = self.splat(-200.0)
        x = self.b.select(self.b.fcmp_ordered("<", x, low), low, x)
        whole = self.b.call(self.declare("llvm.rint.v16f32", _VEC, [_VEC]), [x])
        rest, out = self.b.fsub(x, whole), self.splat(_EXP2[0])
        for coefficient in _EXP2[1:]:
            out = self.fma(out, rest, self.splat(coefficient))
        scale = self.declare("llvm.x86.avx512.mask.scalef.ps.512", _VEC, [_VEC, _VEC, _VEC, _I16, _I32])
        return self.b.call(scale, [out, whole, out, _I16(-1), _I32(4)])

    def prefetch(self, pointer: Any, lanes: int) -> None:
        """Prefetch a row of bf16 numbers."""
        byte = ir.IntType(8).as_pointer()
        function = self.declare("llvm.prefetch.p0", ir.VoidType(), [byte, _I32, _I32, _I32])
        for lane in range(0, lanes, 2):
            here = self.b.bitcast(self.at(pointer, lane * LANES), byte)
            self.b.call(function, [here, _I32(0), _I32(2), _I32(1)])

    def declare(self, name: str, result: Any, args: list[Any]) -> Any:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, args), name)


def _vectors(emit: Callable[..., Any]) -> Any:
    """Turn an emitter of vector code into a function for compiled code, which gives an int64 if the emitter returns
    one. The emitter receives an array argument as its pointer, and a tuple as its length, which is a constant."""
    gives = inspect.signature(emit).return_annotation is not None

    def typed(_: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for kind, arg in zip(signature.args, args, strict=True):
                if isinstance(kind, types.Array):
                    values.append(context.make_array(kind)(context, builder, arg).data)
                else:
                    values.append(kind.count if isinstance(kind, types.UniTuple) else arg)
            result = emit(_Emit(builder), *values)
            return result if gives else context.get_dummy_value()

        return (types.int64 if gives else types.void)(*kinds), generate

    typed.__name__, typed.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]
    return intrinsic(typed)


# --- choosing ---------------------------------------------------------------------------------------------------------


@_vectors
def _partial_scores(
    e: _Emit,
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
        base = e.at(words, at, e.times(loop.index, pairs * SIDE_BY_SIDE))
        places = [(g, half) for g in range(group) for half in range(2)]
        # numbers of one place in four sums where registers suffice, so that a sum seldom waits for the one before
        sums = {place: [e.variable(e.splat(0.0)) for _ in range(2 if group <= 4 else 1)] for place in places}
        for pair in range(pairs):
            both = [e.load(e.at(base, pair * SIDE_BY_SIDE + half * LANES), _WORDS) for half in range(2)]
            keys = [(e.lower(word), e.upper(word)) for word in both]
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
            column = e.b.add(e.times(loop.index, SIDE_BY_SIDE), _I64(half * LANES))
            e.store(total, e.at(out, out_at, column, e.times(out_row, g)))


@_vectors
def _greatest(e: _Emit, x: ir.Value, at: ir.Value, vectors: ir.Value, out: ir.Value, out_at: ir.Value) -> None:
    """Store in out[out_at] the greatest number of x from x[at] on. vectors: how many vectors of 16 numbers."""
    top = e.variable(e.splat(float("-inf")))
    with cgutils.for_range(e.b, vectors) as loop:
        e.b.store(e.greater(e.load(e.at(x, at, e.times(loop.index, LANES))), e.b.load(top)), top)
    e.b.store(e.reduce("fmax", e.b.load(top)), e.at(out, out_at))


@_vectors
def _strongest_head(
    e: _Emit, x: ir.Value, row: ir.Value, group: int, tops: ir.Value, vectors: ir.Value, out: ir.Value
) -> None:
    """Compute out[t] = the greatest x[g, t] - tops[g] of all query heads g. row: elements of x from head to head. tops:
    each head's greatest score. vectors: of 16 numbers in a row."""
    with cgutils.for_range(e.b, vectors) as loop:
        column = e.times(loop.index, LANES)
        best = None
        for g in range(group):
            value = e.b.fsub(e.load(e.at(x, column, e.times(row, g))), e.splat(e.b.load(e.at(tops, g))))
            best = value if best is None else e.greater(value, best)
        e.store(best, e.at(out, column))


@_vectors
def _count_above(e: _Emit, x: ir.Value, vectors: ir.Value, threshold: ir.Value) -> ir.Value:
    """Count the numbers above a threshold."""
    total = e.variable(e.splat(0, _WORDS))
    with cgutils.for_range(e.b, vectors) as loop:
        above = e.b.fcmp_ordered(">", e.load(e.at(x, e.times(loop.index, LANES))), e.splat(threshold))
        e.b.store(e.b.sub(e.b.load(total), e.b.sext(above, _WORDS)), total)
    reduced = e.b.call(e.declare("llvm.vector.reduce.add.v16i32", _I32, [_WORDS]), [e.b.load(total)])
    return e.b.zext(reduced, _I64)


@_vectors
def _places_above(
    e: _Emit, x: ir.Value, vectors: ir.Value, threshold: ir.Value, out: ir.Value, out_at: ir.Value
) -> ir.Value:
    """Store the places, int32 and ascending, of the numbers above a threshold, and return their count. Up to 15 numbers
    after the last one are overwritten."""
    compress = e.declare("llvm.x86.avx512.mask.compress.v16i32", _WORDS, [_WORDS, _WORDS, _MASK])
    count_bits = e.declare("llvm.ctpop.i16", _I16, [_I16])
    found = e.variable(_I64(0))
    lanes = ir.Constant(_WORDS, list(range(LANES)))
    with cgutils.for_range(e.b, vectors) as loop:
        first = e.times(loop.index, LANES)
        above = e.b.fcmp_ordered(">", e.load(e.at(x, first)), e.splat(threshold))
        places = e.b.add(e.splat(e.b.trunc(first, _I32), _WORDS), lanes)
        packed = e.b.call(compress, [places, places, above])
        e.store(packed, e.at(out, out_at, e.b.load(found)))
        bits = e.b.call(count_bits, [e.b.bitcast(above, _I16)])
        e.b.store(e.b.add(e.b.load(found), e.b.zext(bits, _I64)), found)
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


@_vectors
def _scores(
    e: _Emit,
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
        e.prefetch(e.at(k, e.b.load(e.at(places, loop.index, _AHEAD))), lanes)
        key = [e.bf16(e.at(base, lane * LANES)) for lane in range(lanes)]
        for g in range(group):
            total = e.splat(0.0)
            for lane in range(lanes):
                total = e.fma(e.load(e.at(q, q_at, (g * lanes + lane) * LANES)), key[lane], total)
            e.b.store(e.reduce("fadd", total), e.at(out, loop.index, e.times(out_row, g)))


@_vectors
def _soften(e: _Emit, scores: ir.Value, at: ir.Value, vectors: ir.Value, stats: ir.Value) -> None:
    """Replace scores by their weights in the softmax, 2 ** (scores - max), and store their sum."""
    top = e.variable(e.splat(float("-inf")))
    with cgutils.for_range(e.b, vectors) as loop:
        e.b.store(e.greater(e.load(e.at(scores, at, e.times(loop.index, LANES))), e.b.load(top)), top)
    highest = e.splat(e.reduce("fmax", e.b.load(top)))
    total = e.variable(e.splat(0.0))
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(scores, at, e.times(loop.index, LANES))
        weights = e.exp2(e.b.fsub(e.load(here), highest))
        e.store(weights, here)
        e.b.store(e.b.fadd(e.b.load(total), weights), total)
    e.b.store(e.reduce("fadd", e.b.load(total)), stats)


@_vectors
def _mix(
    e: _Emit,
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
        sums = {(g, lane): e.variable(e.splat(0.0)) for g in range(group) for lane in chunk}
        with cgutils.for_range(e.b, count) as loop:
            base = e.at(v, e.b.load(e.at(places, loop.index)))
            if first == 0:
                e.prefetch(e.at(v, e.b.load(e.at(places, loop.index, _AHEAD))), lanes)
            for lane in chunk:
                value = e.bf16(e.at(base, lane * LANES))
                for g in range(group):
                    weight = e.b.load(e.at(p, loop.index, e.times(p_row, g)))
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
