"""Decoding in bf16 on CPUs with AVX-512, compiled by numba: products of few rows with packed weights, and attention of
single query rows over paged KV, both at the speed of memory, and RMSNorm of any rows.

The inner loops are written as LLVM vectors of 16 fp32 numbers, because compiled scalar loops reach half that speed.
bf16 is widened in registers; all sums are fp32. The order of a sum depends only on the row it belongs to, neither on
other rows of the batch nor on the number of threads. NaN stays NaN.

Import this through `kernels.cpu.available.decode_kernels`. All code is in one file, because numba's disk cache notices
changes only in the file of the compiled function.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import extending, njit, prange, threading_layer, types
from numba.core import cgutils

from kernels.views import Bf16, Constant, Fp32, Int32, Int64, Words

LANES = 16
TILE = 4  # rows that share one pass over the weights; their sums fill half of the registers
PART = 512  # keys that one task of attention covers
_PREFETCH = 4096  # bytes; needed because the hardware's own prefetch stops at the end of a page
_AHEAD = 32  # at most this many rows ahead, so that the row is in this run of pages or in the next

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VEC, _VEC_I16, _VEC_I32 = (ir.VectorType(t, LANES) for t in (_F32, _I16, _I32))
# 2 ** r for |r| <= 1/2, to 1e-7
_EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)
LOG2_E = 1.4426950408889634


def intrinsic(function: Callable[..., Any]) -> Any:
    """Hide numba's own type hints for what it makes of `function`, which are wrong."""
    return extending.intrinsic(function)


# --- vectors ----------------------------------------------------------------------------------------------------------


class _Emit:
    """Emits vector code into a function that numba compiles. Offsets and strides count elements."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, base: Any, offset: Any) -> Any:
        return self.b.gep(base, [offset])

    def add(self, x: Any, y: Any) -> Any:
        return self.b.add(x, _I64(y) if isinstance(y, int) else y)

    def mul(self, x: Any, y: Any) -> Any:
        return self.b.mul(x, _I64(y) if isinstance(y, int) else y)

    def load(self, pointer: Any, kind: Any = _VEC) -> Any:
        bits = kind.element.width // 8 if kind is not _VEC else 4
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=bits)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def bf16(self, pointer: Any) -> Any:
        """Load 16 bf16 numbers and widen them."""
        return self._upper(self.b.zext(self.load(pointer, _VEC_I16), _VEC_I32))

    def bf16_pairs(self, pointer: Any) -> tuple[Any, Any]:
        """Load 32 bf16 numbers as their even and their odd ones."""
        both = self.load(pointer, _VEC_I32)
        mask = ir.Constant(_VEC_I32, [0xFFFF0000] * LANES)
        return self._upper(both), self.b.bitcast(self.b.and_(both, mask), _VEC)

    def _upper(self, x: Any) -> Any:
        return self.b.bitcast(self.b.shl(x, ir.Constant(_VEC_I32, [16] * LANES)), _VEC)

    def splat(self, scalar: Any) -> Any:
        if isinstance(scalar, float):
            return ir.Constant(_VEC, [scalar] * LANES)
        one = self.b.insert_element(ir.Constant(_VEC, ir.Undefined), scalar, _I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(_VEC_I32, [0] * LANES))

    def sums(self, count: int) -> list[Any]:
        """Create vectors of zeros that loops may change."""
        return [cgutils.alloca_once_value(self.b, ir.Constant(_VEC, [0.0] * LANES)) for _ in range(count)]

    def add_product(self, target: Any, x: Any, y: Any) -> None:
        self.b.store(self.fma(x, y, self.b.load(target)), target)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.b.call(self.declare("llvm.fma.v16f32", _VEC, [_VEC] * 3), [x, y, z])

    def reduce(self, name: str, x: Any) -> Any:
        """Reduce the lanes by `fadd` or `fmax`, in a tree."""
        first = [_F32(0.0)] if name == "fadd" else []
        kinds = [v.type for v in (*first, x)]
        function = self.declare(f"llvm.vector.reduce.{name}.v16f32", _F32, kinds)
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

    def prefetch(self, pointer: Any) -> None:
        byte = ir.IntType(8).as_pointer()
        function = self.declare("llvm.prefetch.p0", ir.VoidType(), [byte, _I32, _I32, _I32])
        self.b.call(function, [self.b.bitcast(pointer, byte), _I32(0), _I32(2), _I32(1)])

    def prefetch_row(self, rows: Any, at: Any, step: Any, index: Any, count: Any, next_at: Any, lanes: int) -> None:
        """Prefetch the row that is read some rows after `index`, from the run of `count` rows at `at` or from the next
        run."""
        ahead = self.add(index, max(1, min(_AHEAD, _PREFETCH // (lanes * LANES * 2))))
        inside = self.b.icmp_signed("<", ahead, count)
        row = self.b.select(inside, ahead, self.b.sub(ahead, count))
        base = self.at(rows, self.add(self.b.select(inside, at, next_at), self.mul(step, row)))
        for lane in range(0, lanes, 2):
            self.prefetch(self.at(base, _I64(lane * LANES)))

    def declare(self, name: str, result: Any, args: list[Any]) -> Any:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, args), name)


def _vectors(emit: Callable[..., None]) -> Any:
    """Turn an emitter of vector code into a statement for compiled functions. It receives an array argument as its
    pointer, and a tuple as its length, which is a constant."""

    def typed(_: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for kind, arg in zip(signature.args, args, strict=True):
                if isinstance(kind, types.Array):
                    values.append(context.make_array(kind)(context, builder, arg).data)
                else:
                    values.append(kind.count if isinstance(kind, types.UniTuple) else arg)
            emit(_Emit(builder), *values)
            return context.get_dummy_value()

        return types.void(*kinds), generate

    typed.__name__, typed.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]
    return intrinsic(typed)


@_vectors
def _products(
    e: _Emit,
    x: ir.Value,
    x_at: ir.Value,
    x_row: ir.Value,
    rows: int,
    w: ir.Value,
    w_at: ir.Value,
    lanes: int,
    pairs: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute out[r, n] = sum over k of x[r, k] * w[k // 2, n, k % 2] for a tile of rows and one block of outputs. x,
    out fp32; w bf16 pairs as 32-bit words; lanes: vectors per block."""
    sums = e.sums(rows * lanes)
    with cgutils.for_range(e.b, pairs) as loop:
        base = e.at(w, e.add(w_at, e.mul(loop.index, lanes * LANES)))
        for lane in range(lanes):
            here = e.at(base, _I64(lane * LANES))
            e.prefetch(e.at(here, _I64(_PREFETCH // 4)))
            low, high = e.bf16_pairs(here)
            for row in range(rows):
                at = e.add(e.add(x_at, e.mul(x_row, row)), e.mul(loop.index, 2))
                e.add_product(sums[row * lanes + lane], e.splat(e.b.load(e.at(x, at))), low)
                e.add_product(sums[row * lanes + lane], e.splat(e.b.load(e.at(x, e.add(at, 1)))), high)
    for row in range(rows):
        for lane in range(lanes):
            e.store(
                e.b.load(sums[row * lanes + lane]), e.at(out, e.add(e.add(out_at, e.mul(out_row, row)), lane * LANES))
            )


@_vectors
def _scores(
    e: _Emit,
    q: ir.Value,
    q_at: ir.Value,
    group: int,
    lanes: int,
    k: ir.Value,
    k_at: ir.Value,
    k_row: ir.Value,
    count: ir.Value,
    next_at: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute out[g, t] = q[g] . k[t] for `count` keys. q, out fp32; k bf16. next_at: where the next keys will be
    read."""
    with cgutils.for_range(e.b, count) as loop:
        base = e.at(k, e.add(k_at, e.mul(k_row, loop.index)))
        key = [e.bf16(e.at(base, _I64(lane * LANES))) for lane in range(lanes)]
        e.prefetch_row(k, k_at, k_row, loop.index, count, next_at, lanes)
        for g in range(group):
            total = e.splat(0.0)
            for lane in range(lanes):
                at = e.add(q_at, (g * lanes + lane) * LANES)
                total = e.fma(e.load(e.at(q, at)), key[lane], total)
            e.b.store(e.reduce("fadd", total), e.at(out, e.add(e.add(out_at, e.mul(out_row, g)), loop.index)))


@_vectors
def _soften(e: _Emit, scores: ir.Value, at: ir.Value, vectors: ir.Value, stats: ir.Value, stats_at: ir.Value) -> None:
    """Replace scores by 2 ** (scores - max) and store the maximum and the sum in stats."""
    top = cgutils.alloca_once_value(e.b, ir.Constant(_VEC, [float("-inf")] * LANES))
    with cgutils.for_range(e.b, vectors) as loop:
        x, old = e.load(e.at(scores, e.add(at, e.mul(loop.index, LANES)))), e.b.load(top)
        e.b.store(e.b.select(e.b.fcmp_ordered(">", x, old), x, old), top)
    highest = e.reduce("fmax", e.b.load(top))
    (total,) = e.sums(1)
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(scores, e.add(at, e.mul(loop.index, LANES)))
        weights = e.exp2(e.b.fsub(e.load(here), e.splat(highest)))
        e.store(weights, here)
        e.b.store(e.b.fadd(e.b.load(total), weights), total)
    e.b.store(highest, e.at(stats, stats_at))
    e.b.store(e.reduce("fadd", e.b.load(total)), e.at(stats, e.add(stats_at, 1)))


@_vectors
def _mix(
    e: _Emit,
    p: ir.Value,
    p_at: ir.Value,
    p_row: ir.Value,
    group: int,
    lanes: int,
    v: ir.Value,
    v_at: ir.Value,
    v_row: ir.Value,
    count: ir.Value,
    next_at: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
) -> None:
    """Compute out[g] += sum over t of p[g, t] * v[t]. p, out fp32; v bf16. next_at: where the next values will be
    read."""
    together = max(1, 24 // group)  # keeps the sums in registers
    for first in range(0, lanes, together):
        chunk = range(first, min(lanes, first + together))
        where = {
            (g, lane): e.at(out, e.add(out_at, (g * lanes + lane) * LANES)) for g in range(group) for lane in chunk
        }
        sums = {key: cgutils.alloca_once_value(e.b, e.load(pointer)) for key, pointer in where.items()}
        with cgutils.for_range(e.b, count) as loop:
            base = e.at(v, e.add(v_at, e.mul(v_row, loop.index)))
            if first == 0:
                e.prefetch_row(v, v_at, v_row, loop.index, count, next_at, lanes)
            for lane in chunk:
                value = e.bf16(e.at(base, _I64(lane * LANES)))
                for g in range(group):
                    weight = e.b.load(e.at(p, e.add(e.add(p_at, e.mul(p_row, g)), loop.index)))
                    e.add_product(sums[g, lane], e.splat(weight), value)
        for key, pointer in where.items():
            e.store(e.b.load(sums[key]), pointer)


@_vectors
def _gated(e: _Emit, gate: ir.Value, up: ir.Value, vectors: ir.Value) -> None:
    """Compute silu(gate) * up in place of gate, both fp32."""
    with cgutils.for_range(e.b, vectors) as loop:
        here = e.at(gate, e.mul(loop.index, LANES))
        x = e.load(here)
        # 1 / (1 + exp(-x)) computed from exp(-|x|), which cannot overflow
        size = e.b.call(e.declare("llvm.fabs.v16f32", _VEC, [_VEC]), [x])
        small = e.exp2(e.b.fmul(size, e.splat(-LOG2_E)))
        over = e.b.select(e.b.fcmp_ordered("<", x, e.splat(0.0)), small, e.splat(1.0))
        sigmoid = e.b.fdiv(over, e.b.fadd(e.splat(1.0), small))
        e.store(e.b.fmul(e.b.fmul(x, sigmoid), e.load(e.at(up, e.mul(loop.index, LANES)))), here)


@intrinsic
def _widened(_: Any, x: types.Type) -> Any:
    """Convert bf16 as uint16 to float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(types.uint16), generate


@intrinsic
def _rounded(_: Any, x: types.Type) -> Any:
    """Convert float32 to bf16 as uint16, without a branch, so that loops around it are vectorised."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), _I16)

    return types.uint16(types.float32), generate


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # there is no directory for numba's cache
            return njit(nogil=True, **options)(function)

    return decorate


class Product(NamedTuple):
    """A linear layer. words: the bf16 weight in blocks [blocks, pairs, LANES * len(lanes), 2], as flat uint32 [...];
    bias fp32 [outputs], or of size 0."""

    words: Words
    bias: Fp32
    inputs: int
    outputs: int
    lanes: Constant


class Norm(NamedTuple):
    """RMSNorm. weight fp32 [width], or of size 0 if there is no norm."""

    weight: Fp32
    eps: float


class AttentionTasks(NamedTuple):
    """The attention tasks of one step, ordered by row. Fields are int64 [parts], except `starts` [rows + 1]."""

    row: Int64
    first: Int64  # context row of the first key
    keys: Int64
    starts: Int64  # where each row's parts begin


@compiled(fastmath={"reassoc", "contract"})
def _inverse_rms(x: Fp32, eps: float) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    inverse: np.float32 = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + np.float32(eps))
    return inverse


@compiled(fastmath={"reassoc", "contract"})
def _square_sum(x: Bf16) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += _widened(x[i]) * _widened(x[i])
    return total


@compiled(parallel=True, error_model="numpy")
def norm(x: Bf16, weight: Fp32, eps: float, out: Bf16) -> None:
    """Compute RMSNorm of rows. x, out bf16 [rows, width]; weight fp32 [width]; sums and products in fp32.
    One core takes 230 us for 1,124 rows of 768, and 900 with torch."""
    width = len(weight)
    for row in prange(len(x)):
        scale = np.float32(1.0) / np.sqrt(_square_sum(x[row]) / np.float32(width) + np.float32(eps))
        for i in range(width):
            out[row, i] = _rounded(_widened(x[row, i]) * scale * weight[i])


@compiled()
def _normed(x: Fp32, norm: Norm, out: Fp32) -> None:
    """Normalise rows of x into out. If out is longer than x, the rest becomes 0."""
    for row in range(len(x)):
        scale = _inverse_rms(x[row], norm.eps)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * norm.weight[i]
        out[row, x.shape[1] :] = np.float32(0.0)


@compiled()
def _norm_in_place(x: Fp32, norm: Norm) -> None:
    if len(norm.weight):
        scale = _inverse_rms(x, norm.eps)
        for i in range(len(x)):
            x[i] *= scale * norm.weight[i]


@compiled()
def _widen(x: Bf16, out: Fp32) -> None:
    for row in range(len(x)):
        for i in range(x.shape[1]):
            out[row, i] = _widened(x[row, i])
        out[row, x.shape[1] :] = np.float32(0.0)


@compiled()
def _block(x: Fp32, words: Words, lanes: Constant, block: int, out: Fp32) -> None:
    """Compute one block of outputs for every row."""
    pairs = x.shape[1] // 2
    width = len(lanes) * LANES
    at, column = block * pairs * width, block * width
    row, ins, outs = 0, x.shape[1], out.shape[1]
    while row + 8 <= len(x):
        _products(x, row * ins, ins, (0,) * 8, words, at, lanes, pairs, out, row * outs + column, outs)
        row += 8
    if row + 4 <= len(x):
        _products(x, row * ins, ins, (0, 0, 0, 0), words, at, lanes, pairs, out, row * outs + column, outs)
        row += 4
    if row + 2 <= len(x):
        _products(x, row * ins, ins, (0, 0), words, at, lanes, pairs, out, row * outs + column, outs)
        row += 2
    if row < len(x):
        _products(x, row * ins, ins, (0,), words, at, lanes, pairs, out, row * outs + column, outs)


@compiled()
def _padded(inputs: int) -> int:
    return (inputs + 31) // 32 * 32


@compiled()
def _with_room(x: Fp32, inputs: int) -> Fp32:
    """Copy rows into fp32 [rows, padded inputs], with zeros after the inputs."""
    out = np.zeros((len(x), _padded(inputs)), np.float32)
    for row in range(len(x)):
        for i in range(inputs):
            out[row, i] = x[row, i]
    return out


@compiled()
def _add_bias(x: Fp32, bias: Fp32) -> None:
    for row in range(len(x)):
        for i in range(len(bias)):
            x[row, i] += bias[i]


@compiled(parallel=True)
def _all_blocks(x: Fp32, words: Words, lanes: Constant, out: Fp32) -> None:
    for block in prange(out.shape[1] // (len(lanes) * LANES)):
        _block(x, words, lanes, block, out)


@compiled(parallel=True)
def _all_blocks_of_two(x: Fp32, words: Words, more_words: Words, lanes: Constant, out: Fp32, more: Fp32) -> None:
    for block in prange(out.shape[1] // (len(lanes) * LANES)):
        _block(x, words, lanes, block, out)
        _block(x, more_words, lanes, block, more)


@compiled()
def _multiply(x: Fp32, product: Product) -> Fp32:
    """Multiply x fp32 [rows, padded inputs] by a linear layer -> fp32 [rows, at least outputs]."""
    out = np.empty((len(x), len(product.words) * 2 // x.shape[1]), np.float32)
    _all_blocks(x, product.words, product.lanes, out)
    _add_bias(out, product.bias)
    return out


@compiled()
def _multiply_gated(x: Fp32, gate: Product, up: Product) -> Fp32:
    """Compute silu(gate(x)) * up(x), fp32 [rows, at least outputs]."""
    gates = np.empty((len(x), len(gate.words) * 2 // x.shape[1]), np.float32)
    ups = np.empty_like(gates)
    _all_blocks_of_two(x, gate.words, up.words, gate.lanes, gates, ups)
    _add_bias(gates, gate.bias)
    _add_bias(ups, up.bias)
    _gated(gates, ups, gates.size // LANES)
    return gates


@compiled()
def linear(x: Bf16, product: Product, out: Bf16) -> None:
    """Compute a linear layer: x bf16 [rows, inputs] -> out bf16 [rows, outputs]."""
    wide = np.empty((len(x), _padded(product.inputs)), np.float32)
    _widen(x, wide)
    result = _multiply(wide, product)
    for row in range(len(x)):
        for i in range(product.outputs):
            out[row, i] = _rounded(result[row, i])


@compiled(parallel=True)
def _attend_parts(
    q: Fp32,
    k: Bf16,
    v: Bf16,
    table: Int32,
    parts: AttentionTasks,
    group: Constant,
    k_lanes: Constant,
    v_lanes: Constant,
    mixed: Fp32,
    stats: Fp32,
) -> None:
    page_size, kv_heads = k.shape[1], k.shape[2]
    k_page, k_row, k_head = k.strides[0] // 2, k.strides[1] // 2, k.strides[2] // 2
    v_page, v_row, v_head = v.strides[0] // 2, v.strides[1] // 2, v.strides[2] // 2
    heads, k_dim, v_dim = kv_heads * len(group), k.shape[3], v.shape[3]
    for task in prange(len(parts.row) * kv_heads):
        part, kv_head = task // kv_heads, task % kv_heads
        row, first, count = parts.row[part], parts.first[part], parts.keys[part]
        head = kv_head * len(group)
        padded = (count + LANES - 1) // LANES * LANES
        scores = np.empty(len(group) * padded, np.float32)
        # Each run: page, row in it, number of rows; adjacent pages form one run. After the last run: where the next
        # part begins.
        runs = np.empty((count // page_size + 3, 3), np.int64)
        num_runs, done = 0, 0
        while done < count:
            index, start = (first + done) // page_size, (first + done) % page_size
            page = np.int64(table[row, index])
            length = page_size - start
            while length < count - done and table[row, index + 1] == table[row, index] + 1:
                length, index = length + page_size, index + 1
            length = min(length, count - done)
            runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = page, start, length
            num_runs, done = num_runs + 1, done + length
        runs[num_runs, 0] = table[row, min((first + count) // page_size, table.shape[1] - 1)]
        runs[num_runs, 1] = (first + count) % page_size
        done, at = 0, runs[0, 0] * k_page + runs[0, 1] * k_row + kv_head * k_head
        for i in range(num_runs):
            behind = runs[i + 1, 0] * k_page + runs[i + 1, 1] * k_row + kv_head * k_head
            first_q = (row * heads + head) * k_dim
            _scores(q, first_q, group, k_lanes, k, at, k_row, runs[i, 2], behind, scores, done, padded)
            at = behind
            done += runs[i, 2]
        out = (part * heads + head) * v_dim
        for g in range(len(group)):
            scores[g * padded + count : (g + 1) * padded] = -np.inf
            _soften(scores, g * padded, padded // LANES, stats, (part * heads + head + g) * 2)
            mixed[part, head + g] = np.float32(0.0)
        done, at = 0, runs[0, 0] * v_page + runs[0, 1] * v_row + kv_head * v_head
        for i in range(num_runs):
            behind = runs[i + 1, 0] * v_page + runs[i + 1, 1] * v_row + kv_head * v_head
            _mix(scores, done, padded, group, v_lanes, v, at, v_row, runs[i, 2], behind, mixed, out)
            at = behind
            done += runs[i, 2]


def plan(contexts: Sequence[int], window: int | None) -> AttentionTasks:
    """Split attention of single rows into tasks of at most PART keys. The split of a row depends on its own context
    alone."""
    last = np.asarray(contexts, dtype=np.int64)
    begin = np.zeros_like(last) if window is None else np.maximum(0, last - window)
    tasks = -(-(last - begin) // PART)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(tasks)))
    row = np.repeat(np.arange(len(last)), tasks)
    first = begin[row] + (np.arange(starts[-1]) - starts[row]) * PART
    return AttentionTasks(row, first, np.minimum(PART, last[row] - first), starts)


@compiled()
def attend(
    q: Fp32,
    k: Bf16,
    v: Bf16,
    table: Int32,
    parts: AttentionTasks,
    group: Constant,
    k_lanes: Constant,
    v_lanes: Constant,
    out: Fp32,
) -> None:
    """Attention of single rows, each the last of its context. q fp32 [rows, heads, k_dim], multiplied by scale *
    log2(e); k, v bf16 [pages, page_size, kv_heads, dim], with any strides except that dim is contiguous; table int32
    [rows, pages]; out fp32 [rows, heads, v_dim]. group, k_lanes, v_lanes: tuples whose lengths are the heads per kv
    head and the vectors per dim of keys and values."""
    heads, dim = out.shape[1], out.shape[2]
    mixed = np.empty((len(parts.row), heads, dim), np.float32)
    stats = np.empty((len(parts.row), heads, 2), np.float32)
    _attend_parts(q, k, v, table, parts, group, k_lanes, v_lanes, mixed, stats)
    for row in range(len(out)):
        begin, end = parts.starts[row], parts.starts[row + 1]
        for head in range(heads):
            top = np.float32(-np.inf)
            for part in range(begin, end):
                if stats[part, head, 0] > top:
                    top = stats[part, head, 0]
            total = np.float32(0.0)
            for d in range(dim):
                out[row, head, d] = np.float32(0.0)
            for part in range(begin, end):
                share = np.float32(np.exp2(stats[part, head, 0] - top))
                total += share * stats[part, head, 1]
                for d in range(dim):
                    out[row, head, d] += share * mixed[part, head, d]
            for d in range(dim):
                out[row, head, d] /= total


@compiled()
def project(
    hidden: Bf16, norm: Norm, product: Product, q_norm: Norm, k_norm: Norm, num_q: int, num_k: int, out: Bf16
) -> None:
    """The first part of a layer: hidden bf16 [rows, width] -> out bf16 [rows, q + k + v heads, dim], not rotated."""
    wide = np.empty((len(hidden), hidden.shape[1]), np.float32)
    _widen(hidden, wide)
    x = np.empty((len(hidden), _padded(product.inputs)), np.float32)
    _normed(wide, norm, x)
    result = _multiply(x, product)
    dim = out.shape[2]
    for row in range(len(out)):
        for head in range(out.shape[1]):
            y = result[row, head * dim : (head + 1) * dim]
            if head < num_q:
                _norm_in_place(y, q_norm)
            elif head < num_q + num_k:
                _norm_in_place(y, k_norm)
            for d in range(dim):
                out[row, head, d] = _rounded(y[d])


@compiled()
def _rotate(x: Bf16, cos: Bf16, sin: Bf16, out: Bf16) -> None:
    """Rotate exactly as torch does in bf16, bit for bit, because keys rotated after loading must be the same."""
    half = len(cos) // 2
    for d in range(half):
        low, high = _widened(x[d]), _widened(x[half + d])
        a, b = _widened(_rounded(low * _widened(cos[d]))), _widened(_rounded(high * _widened(cos[half + d])))
        out[d] = _rounded(a - high * _widened(sin[d]))
        out[half + d] = _rounded(b + low * _widened(sin[half + d]))


@compiled()
def _save(rows: Bf16, first: int, blocks: Bf16, spots: Int64) -> None:
    """Save rows [n, heads, dim] to their blocks. Heads from `first` on are K and V, half each."""
    half, dim = (rows.shape[1] - first) // 2, rows.shape[2]
    for row in range(len(spots)):
        if spots[row, 0] >= 0:
            block, at = blocks[spots[row, 0]], spots[row, 1] * half * dim
            for part in range(2):
                # A slot is not in the caches: stores of whole cache lines proceed beside the work, single words would
                # stall it.
                for head in range(half):
                    source = rows[row, first + part * half + head]
                    target = block[at + head * dim : at + (head + 1) * dim]
                    for d in range(dim):
                        target[d] = source[d]
                at += blocks.shape[1] // 2


@compiled()
def turn(
    rows: Bf16,
    cos: Bf16,
    sin: Bf16,
    slots: Int64,
    blocks: Bf16,
    spots: Int64,
    scale: np.float32,
    k: Bf16,
    v: Bf16,
    group: Constant,
) -> Fp32:
    """Rotate, and write keys and values to their slots. Returns the queries fp32 [rows, heads, dim], multiplied by
    scale * log2(e). Arguments as in `finish`."""
    count, page_size, num_k, dim = len(rows), k.shape[1], k.shape[2], k.shape[3]
    num_q = num_k * len(group)
    q = np.empty((count, num_q, dim), np.float32)
    turned = np.empty(dim, np.uint16)
    for row in range(count):
        for head in range(num_q):
            _rotate(rows[row, head], cos[row], sin[row], turned)
            for d in range(dim):
                q[row, head, d] = _widened(turned[d]) * np.float32(scale * LOG2_E)
        page, place = slots[row] // page_size, slots[row] % page_size
        for head in range(num_k):
            _rotate(rows[row, num_q + head], cos[row], sin[row], k[page, place, head])
            for d in range(dim):
                v[page, place, head, d] = rows[row, num_q + num_k + head, d]
    _save(rows, num_q, blocks, spots)
    return q


@compiled()
def complete(
    hidden: Bf16, mixed: Fp32, o: Product, norm: Norm, gate: Product, up: Product, down: Product, out: Bf16
) -> None:
    """What comes behind attention, mixed fp32 [rows, heads, dim]: project, add, and apply the gated MLP. Arguments as
    in `finish`."""
    count, width = hidden.shape
    middle = _multiply(_with_room(mixed.reshape(count, mixed.shape[1] * mixed.shape[2]), o.inputs), o)[:, :width]
    for row in range(count):
        for i in range(width):
            middle[row, i] += _widened(hidden[row, i])
    x = np.empty((count, _padded(width)), np.float32)
    _normed(middle, norm, x)
    result = _multiply(_with_room(_multiply_gated(x, gate, up), down.inputs), down)
    for row in range(count):
        for i in range(width):
            out[row, i] = _rounded(result[row, i] + middle[row, i])


@compiled()
def finish(
    hidden: Bf16,
    rows: Bf16,
    cos: Bf16,
    sin: Bf16,
    slots: Int64,
    blocks: Bf16,
    spots: Int64,
    scale: np.float32,
    k: Bf16,
    v: Bf16,
    table: Int32,
    parts: AttentionTasks,
    group: Constant,
    lanes: Constant,
    o: Product,
    norm: Norm,
    gate: Product,
    up: Product,
    down: Product,
    out: Bf16,
) -> None:
    """The rest of a layer: rotate, write keys and values to their slots, attend, project, add, and apply the gated MLP.
    rows: the output of `project`; cos, sin bf16 [rows, dim]; slots int64 [rows]; out bf16 [rows, width]. Un-rotated
    keys and values are saved to blocks bf16 [blocks, K of all rows of a block, then V]; spots int64 [rows, 2] gives
    each row's block and the row in it; block -1: not saved; spots without rows: none is saved."""
    q = turn(rows, cos, sin, slots, blocks, spots, scale, k, v, group)
    mixed = np.empty(q.shape, np.float32)
    attend(q, k, v, table, parts, group, lanes, lanes, mixed)
    complete(hidden, mixed, o, norm, gate, up, down, out)


def self_test() -> None:
    """Compile and run one parallel loop, and check its result. Raises an error if anything is wrong."""
    weight = np.arange(64 * 32, dtype=np.uint16).reshape(2, 16, 32, 2) % 100 + 0x3F00
    product = Product(weight.view(np.uint32).reshape(-1), np.ones(64, np.float32), 32, 64, (0,) * 2)
    x = np.arange(32, dtype=np.uint16).reshape(1, 32) + 0x3F80
    out = np.zeros((1, 64), np.uint16)
    linear(x, product, out)
    wide = (weight.astype(np.uint32) << 16).view(np.float32).transpose(0, 2, 1, 3).reshape(64, 32)
    want = wide @ (x[0].astype(np.uint32) << 16).view(np.float32) + 1
    got = (out[0].astype(np.uint32) << 16).view(np.float32)
    if not np.allclose(got, want, rtol=2**-8):
        raise RuntimeError("compiled products are wrong")
    if threading_layer() != "omp":
        raise RuntimeError(f"numba's threads are of {threading_layer()}")
