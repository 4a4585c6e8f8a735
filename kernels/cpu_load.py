"""Blocks at rest into pages, compiled by numba: keys rotated for their present positions and values as they are, in one
pass over memory. The loading thread calls it while the engine computes, so it is serial, lets go of the GIL, and makes
no temporaries.

Measured on one core, 12 layers of 1,600 tokens with 4 heads of 64, neither source nor pages in the caches: 2.8 ms;
without asking for memory ahead 6.3; torch's gather, rotation and writes 18.

Get this from `kernels.block_writer`. What is compiled has no type hints: numba would not read them. Nothing compiled is
shared with the other files: numba's disk cache would not see a change there.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_decode import compiled

LANES = 16
_LINE = 32  # elements of a cache line
_READ_AHEAD, _WRITE_AHEAD = 1024, 256  # elements; within one head's rows when written
_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_VEC, _VEC_I16, _VEC_I32 = (ir.VectorType(t, LANES) for t in (_F32, _I16, _I32))
_intrinsic: Any = intrinsic  # what its own hints say of the functions it makes is wrong


class _Emit:
    """Writes code for vectors of 16 numbers, or for single ones, into a function that numba compiles."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self._context, self.b, self._lanes = context, builder, lanes
        self._bits = _VEC_I16 if lanes > 1 else _I16
        self._wide_bits, self._wide = (_VEC_I32, _VEC) if lanes > 1 else (_I32, _F32)

    def pointer(self, kind: Any, array: Any, at: Any) -> Any:
        """Of the element `at` of an array of bf16 as uint16."""
        data = self._context.make_array(kind)(self._context, self.b, array).data
        return self.b.bitcast(self.b.gep(data, [at]), self._bits.as_pointer())

    def load(self, pointer: Any) -> Any:
        """As float32."""
        bits = self.b.zext(self.b.load(pointer, align=2), self._wide_bits)
        return self.b.bitcast(self.b.shl(bits, self._all(16)), self._wide)

    def rounded(self, x: Any) -> Any:
        """float32 -> bits of the nearest bf16, ties to even, in the upper half of each 32."""
        bits = self.b.bitcast(x, self._wide_bits)
        odd = self.b.and_(self.b.lshr(bits, self._all(16)), self._all(1))
        rounded = self.b.add(bits, self.b.add(odd, self._all(0x7FFF)))
        nan = self.b.fcmp_unordered("uno", x, x)
        return self.b.select(nan, self._all(0x7FC00000), rounded)

    def rounded_product(self, x: Any, y: Any) -> Any:
        """As float32."""
        bits = self.b.and_(self.rounded(self.b.fmul(x, y)), self._all(0xFFFF0000))
        return self.b.bitcast(bits, self._wide)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once: it shows where the product overflows."""
        name = f"llvm.fma.v{self._lanes}f32" if self._lanes > 1 else "llvm.fma.f32"
        kind = ir.FunctionType(self._wide, [self._wide] * 3)
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), [x, y, z])

    def store(self, x: Any, pointer: Any) -> None:
        """float32 -> the nearest bf16."""
        self.b.store(self.b.trunc(self.b.lshr(self.rounded(x), self._all(16)), self._bits), pointer, align=2)

    def _all(self, bits: int) -> Any:
        return ir.Constant(self._wide_bits, [bits] * self._lanes if self._lanes > 1 else bits)


def _turning(lanes: int) -> Any:
    """Rotate `lanes` pairs, of elements that lie `half` apart. As torch rotates in bf16, to the bit: the product with
    cos is rounded, then the sum."""

    def turn(_, x, at, cos, sin, angle, half, out, to):
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            emit = _Emit(context, b, lanes)
            x_kind, _, cos_kind, sin_kind, _, _, out_kind, _ = signature.args
            x, at, cos, sin, angle, half, out, to = args
            low, high = (emit.load(emit.pointer(x_kind, x, place)) for place in (at, b.add(at, half)))
            angles = angle, b.add(angle, half)
            cosines = [emit.load(emit.pointer(cos_kind, cos, place)) for place in angles]
            sines = [emit.load(emit.pointer(sin_kind, sin, place)) for place in angles]
            first = emit.fma(b.fneg(high), sines[0], emit.rounded_product(low, cosines[0]))
            second = emit.fma(low, sines[1], emit.rounded_product(high, cosines[1]))
            emit.store(first, emit.pointer(out_kind, out, to))
            emit.store(second, emit.pointer(out_kind, out, b.add(to, half)))
            return context.get_dummy_value()

        return types.void(x, types.int64, cos, sin, types.int64, types.int64, out, types.int64), generate

    return _intrinsic(turn)


_turn_many, _turn_one = _turning(LANES), _turning(1)


@_intrinsic
def _copy_many(_, x, at, out, to):
    """LANES numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = _Emit(context, builder, LANES)
        x_kind, _, out_kind, _ = signature.args
        x, at, out, to = args
        builder.store(builder.load(emit.pointer(x_kind, x, at), align=2), emit.pointer(out_kind, out, to), align=2)
        return context.get_dummy_value()

    return types.void(x, types.int64, out, types.int64), generate


def _fetching(write: int) -> Any:
    """Have the cache line of an element, which may lie behind the end, brought before it is needed: the hardware's own
    guesses end with a page of memory."""

    def fetch(_, x, at):
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), byte)
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            builder.call(function, [pointer, _I32(write), _I32(3), _I32(1)])
            return context.get_dummy_value()

        return types.void(x, types.int64), generate

    return _intrinsic(fetch)


_fetch, _fetch_to_write = _fetching(0), _fetching(1)


@compiled()
def _copy(x, at, out, to, count):
    whole = count - count % LANES
    for d in range(0, whole, LANES):
        _copy_many(x, at + d, out, to + d)
    for d in range(whole, count):
        out[to + d] = x[at + d]


@compiled()
def _turn(x, at, cos, sin, angle, half, out, to):
    whole = half - half % LANES
    for d in range(0, whole, LANES):
        _turn_many(x, at + d, cos, sin, angle + d, half, out, to + d)
    for d in range(whole, half):
        _turn_one(x, at + d, cos, sin, angle + d, half, out, to + d)


@compiled(error_model="numpy")
def place(segments, blocks, block_rows, cos, sin, turns, k, k_strides, v, v_strides, page_size, shape):
    """Write one layer of some blocks into their pages.
    segments: bf16 memory as one stream, in it the blocks' keys without position [block_rows, kv_heads, k_dim] and
    behind them their values [block_rows, kv_heads, v_dim]; blocks int64 [blocks, 4]: where in it a block begins, how
    many of its rows are wanted, the slot (page * page_size + row) of the first of them, whose page holds them all, and
    which row of the tables is its; cos, sin: bf16 tables [rows, turns] as streams, turns even and at most k_dim; k, v:
    a pool's bf16 memory as one stream, and strides (page, row, head) in elements; shape: kv_heads, k_dim, v_dim.
    Nothing is checked.
    """
    kv_heads, k_dim, v_dim = shape
    for block in range(len(blocks)):
        start, count, slot, angle = blocks[block]
        page, row = slot // page_size, slot % page_size
        # As the source lies: one stream of reads, and one of writes per head.
        at = start
        to_k = page * k_strides[0] + row * k_strides[1]
        for i in range(count):
            for head in range(kv_heads):
                to = to_k + head * k_strides[2]
                for d in range(0, k_dim, _LINE):
                    _fetch(segments, at + d + _READ_AHEAD)
                    _fetch_to_write(k, to + d + _WRITE_AHEAD)
                _turn(segments, at, cos, sin, (angle + i) * turns, turns // 2, k, to)
                _copy(segments, at + turns, k, to + turns, k_dim - turns)
                at += k_dim
            to_k += k_strides[1]
        at = start + block_rows * kv_heads * k_dim
        to_v = page * v_strides[0] + row * v_strides[1]
        for _ in range(count):
            for head in range(kv_heads):
                to = to_v + head * v_strides[2]
                for d in range(0, v_dim, _LINE):
                    _fetch(segments, at + d + _READ_AHEAD)
                    _fetch_to_write(v, to + d + _WRITE_AHEAD)
                _copy(segments, at, v, to, v_dim)
                at += v_dim
            to_v += v_strides[1]


def self_test() -> None:
    """Compile everything, as it is called later, and compare what comes out. Raises whatever is wrong."""
    rows, dim = 2, 34
    one, two, minus_two = np.uint16(0x3F80), np.uint16(0x4000), np.uint16(0xC000)
    segments = np.full(2 * rows * dim, two)
    blocks = np.array([[0, rows, 0, 0]])
    cos, sin = np.zeros(rows * dim, np.uint16), np.full(rows * dim, one)  # a quarter turn: (x, y) -> (-y, x)
    k, v = np.zeros(rows * dim, np.uint16), np.zeros(rows * dim, np.uint16)
    strides = (rows * dim, dim, rows * dim)
    place(segments, blocks, rows, cos, sin, dim, k, strides, v, strides, rows, (1, dim, dim))
    if (k.reshape(rows, 2, -1) != np.array([minus_two, two])[:, None]).any() or (v != two).any():
        raise RuntimeError("the compiled way into pages is wrong")
