"""Emits the vector code of transform coding: rows to components by products of tiles, and back.

Import this through `reprise.kernels.codecs.transform`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from reprise.kernels.cpu.emit import intrinsic
from reprise.kernels.cpu.transform_format import LANES, ROWS, TILE

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
VEC, WORDS = (ir.VectorType(kind, 16) for kind in (F32, I32))
LANES_F32, LANES_I32, LANES_F64 = (ir.VectorType(kind, LANES) for kind in (F32, I32, ir.DoubleType()))


class Emit:
    """An emitter of vector code into a function that numba compiles. Offsets count elements."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, base: Any, *offsets: Any) -> Any:
        """Return base + the sum of offsets."""
        for offset in offsets:
            base = self.b.gep(base, [I64(offset) if isinstance(offset, int) else offset])
        return base

    def times(self, x: Any, count: int) -> Any:
        return self.b.mul(x, I64(count))

    def load(self, pointer: Any, kind: Any = VEC) -> Any:
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=_bytes(kind))

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=_bytes(value.type))

    def splat(self, scalar: Any, kind: Any = VEC) -> Any:
        if isinstance(scalar, (int, float)):
            return ir.Constant(kind, [scalar] * kind.count)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))

    def shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def variable(self, value: Any) -> Any:
        """Return a variable that is set to `value` here and that loops may change."""
        place = cgutils.alloca_once_value(self.b, value)
        self.b.store(value, place)  # each time that this is come by, not only at the function's begin
        return place

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def load_widened(self, pointer: Any) -> Any:
        """Load 16 numbers of fp32 or bf16, depending on the pointer's type, as fp32."""
        kind = pointer.type.pointee
        whole = self.load(pointer, ir.VectorType(kind, 16))
        if kind.width == 16:
            whole = self.b.shl(self.b.zext(whole, WORDS), self.splat(16, WORDS))
        return self.b.bitcast(whole, VEC)

    def store_rounded(self, x: Any, pointer: Any) -> None:
        """Store 16 numbers as fp32 or rounded to bf16, ties to even, depending on the pointer's type."""
        b, whole = self.b, self.b.bitcast(x, WORDS)
        if pointer.type.pointee.width == 16:
            even = b.and_(b.lshr(whole, self.splat(16, WORDS)), self.splat(1, WORDS))
            whole = b.add(b.add(whole, self.splat(0x7FFF, WORDS)), even)
            whole = b.trunc(b.lshr(whole, self.splat(16, WORDS)), ir.VectorType(I16, 16))
        self.store(whole, pointer)

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """Exchange rows and lanes of 16 vectors, by exchanging squares of 1, 2, 4 and then 8 lanes beside the
        diagonal."""
        rows = list(rows)
        for side in (1, 2, 4, 8):
            upper = [lane - side + 16 if lane & side else lane for lane in range(16)]
            lower = [lane + 16 if lane & side else lane + side for lane in range(16)]
            for i in range(16):
                if not i & side:
                    pair = rows[i], rows[i + side]
                    rows[i], rows[i + side] = self.shuffle(*pair, upper), self.shuffle(*pair, lower)
        return rows

    def gather(self, kind: Any, table: Any, indices: Any) -> Any:
        """Load the elements of a table, of 32 bits, at the index of each of LANES lanes."""
        name = "d.d" if kind is LANES_I32 else "d.ps"
        zeros, every = self.splat(0, kind), self.b.bitcast(self.splat(-1, LANES_I32), kind)
        base = self.b.bitcast(table, I8.as_pointer())
        return self.call(f"llvm.x86.avx2.gather.{name}.256", kind, zeros, base, indices, every, I8(4))

    def count(self, lanes: Any) -> Any:
        """Count the lanes that are true."""
        bits = ir.IntType(lanes.type.count)
        found = self.call(f"llvm.ctpop.i{bits.width}", bits, self.b.bitcast(lanes, bits))
        return self.b.zext(found, I64)

    def none(self, lanes: Any) -> Any:
        return self.b.icmp_unsigned("==", self.b.bitcast(lanes, I8), I8(0))


def _bytes(kind: Any) -> int:
    """Return the size in bytes of an element of a vector type."""
    return 4 if kind.element is F32 else int(kind.element.width) // 8


def vector_code(gives: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Turn an emitter of vector code into a function for compiled code, which returns the numba type `gives`. The
    emitter receives an array argument as its pointer."""

    def made(emit: Callable[..., Any]) -> Any:
        def typed(_: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                values = [
                    context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
                    for kind, arg in zip(signature.args, args, strict=True)
                ]
                result = emit(Emit(builder), *values)
                return context.get_dummy_value() if gives is None else result

            wanted = [types.int64 if isinstance(kind, types.Integer) else kind for kind in kinds]
            return (types.void if gives is None else gives)(*wanted), generate

        typed.__name__, typed.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return made


@vector_code()
def multiply_tile(
    e: Emit,
    x: ir.Value,
    x_at: ir.Value,
    x_step: ir.Value,
    y: ir.Value,
    y_at: ir.Value,
    y_step: ir.Value,
    count: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
    out_step: ir.Value,
) -> None:
    """Set out[i, j] to the sum over c < count of x[c, i] * y[c, j], for i < TILE[0] and j < TILE[1]. x, y, out: fp32
    memory of one axis. x_at, y_at, out_at: the element where each one's tile begins. x_step, y_step, out_step: elements
    from row to row."""
    rows, vectors = range(TILE[0]), range(TILE[1] // 16)
    sums = [[e.variable(e.splat(0.0)) for _ in vectors] for _ in rows]
    with cgutils.for_range(e.b, count) as loop:
        x_row, y_row = (
            e.at(base, at, e.b.mul(step, loop.index)) for base, at, step in ((x, x_at, x_step), (y, y_at, y_step))
        )
        columns = [e.load(e.at(y_row, 16 * v)) for v in vectors]
        for i in rows:
            one = e.splat(e.b.load(e.at(x_row, i)))
            for v in vectors:
                e.b.store(e.call("llvm.fma.v16f32", VEC, one, columns[v], e.b.load(sums[i][v])), sums[i][v])
    for i in rows:
        for v in vectors:
            e.store(e.b.load(sums[i][v]), e.at(out, out_at, e.times(out_step, i), 16 * v))


@vector_code()
def store_k(
    e: Emit,
    product: ir.Value,
    at: ir.Value,
    means: ir.Value,
    scale: ir.Value,
    count: ir.Value,
    raw: ir.Value,
    raw_at: ir.Value,
) -> None:
    """Store means + scale * product as bits in `raw`, for the first numbers of a row: as many of `count` as fill
    vectors of 16. The caller stores the rest."""
    factor = e.splat(scale)
    with cgutils.for_range(e.b, e.b.sdiv(count, I64(16))) as loop:
        j = e.times(loop.index, 16)
        x = e.b.fadd(e.load(e.at(means, j)), e.b.fmul(factor, e.load(e.at(product, at, j))))
        e.store_rounded(x, e.at(raw, raw_at, j))


@vector_code()
def store_v_tile(
    e: Emit,
    numbers: ir.Value,
    at: ir.Value,
    scales: ir.Value,
    scales_at: ir.Value,
    means: ir.Value,
    means_at: ir.Value,
    raw: ir.Value,
    raw_at: ir.Value,
    raw_step: ir.Value,
) -> None:
    """Store mean + scale * number of 16 components and 16 rows, one row after the other. Each component's numbers are
    ROWS apart from the next one's; scales are the rows', means the components'."""
    factors, columns = e.load(e.at(scales, scales_at)), []
    for i in range(16):
        mean = e.splat(e.b.load(e.at(means, means_at, i)))
        columns.append(e.b.fadd(mean, e.b.fmul(factors, e.load(e.at(numbers, at, i * ROWS)))))
    for r, row in enumerate(e.transposed(columns)):
        e.store_rounded(row, e.at(raw, raw_at, e.times(raw_step, r)))


@vector_code()
def spread_tile(
    e: Emit,
    raw: ir.Value,
    raw_at: ir.Value,
    raw_step: ir.Value,
    means: ir.Value,
    means_at: ir.Value,
    out: ir.Value,
    at: ir.Value,
) -> None:
    """Do the reverse of `store_v_tile`: store the numbers of 16 rows minus their means as components, each ROWS apart
    from the next one."""
    mean = e.load(e.at(means, means_at))
    rows = [e.b.fsub(e.load_widened(e.at(raw, raw_at, e.times(raw_step, r))), mean) for r in range(16)]
    for i, column in enumerate(e.transposed(rows)):
        e.store(column, e.at(out, at, i * ROWS))


@vector_code()
def row_energies(e: Emit, numbers: ir.Value, at: ir.Value, count: ir.Value, out: ir.Value, out_at: ir.Value) -> None:
    """Store the sums of the squares of `count` components of 16 rows."""
    total = e.variable(e.splat(0.0))
    with cgutils.for_range(e.b, count) as loop:
        x = e.load(e.at(numbers, at, e.times(loop.index, ROWS)))
        e.b.store(e.b.fadd(e.b.load(total), e.b.fmul(x, x)), total)
    e.store(e.b.load(total), e.at(out, out_at))


@vector_code()
def scale_rows(
    e: Emit, numbers: ir.Value, at: ir.Value, count: ir.Value, scales: ir.Value, scales_at: ir.Value
) -> None:
    """Multiply `count` components of 16 rows by the rows' scales."""
    factors = e.load(e.at(scales, scales_at))
    with cgutils.for_range(e.b, count) as loop:
        place = e.at(numbers, at, e.times(loop.index, ROWS))
        e.store(e.b.fmul(e.load(place), factors), place)


@vector_code(types.float32)
def sum_of_squares(e: Emit, numbers: ir.Value, at: ir.Value) -> ir.Value:
    """Return the sum of the squares of ROWS numbers, added in one order on every machine."""
    vectors = [e.load(e.at(numbers, at, half)) for half in range(0, ROWS, 16)]
    total = functools.reduce(e.b.fadd, [e.b.fmul(x, x) for x in vectors])
    for count in (8, 4, 2, 1):
        total = e.b.fadd(e.shuffle(total, total, range(count)), e.shuffle(total, total, range(count, 2 * count)))
    return e.b.extract_element(total, I64(0))
