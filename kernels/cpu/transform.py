"""Transform coding of a layer's blocks, compiled by numba: rows to components and whole numbers, those to a stream of
constant size by an entropy coder (rANS, Duda 2013: https://arxiv.org/abs/1311.2540), and back.

A segment, as uint16 words in little-endian order:

    word 0           how many eighths of an octave the steps are coarser than calibrated, plus FINEST
    words 1 .. 16    the coder's LANES final states, low word first
    then             an exponent for each row and head of V, a byte each: V is scaled by 2^(exponent / 4)
    then             the coder's words, in the order in which decoding reads them, and zeros

Component by component, 32 rows at a time; row r belongs to lane r mod LANES. With AVX-512 the eight lanes of a block
are decoded as one vector, and two blocks at a time, so that their chains of dependent instructions overlap. Import this
through `kernels.codecs.transform`.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import config, prange, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numpy.typing import NDArray

from kernels.cpu.decode import compiled, intrinsic
from kernels.views import Fp32, Int64, Words

# The constants stand here, in the one file that numba's disk cache watches.
PROBABILITY_BITS = 12
LEAST_CLASS, LARGEST_CLASS = -14, 8  # quarter octaves of s / d: 0.09 to 4
"""Below the least, everything rounds to zero and costs nothing. Above the largest, the lowest bits are stored as they
are, so that the rest is in the range."""
REACH = 23  # symbols are -REACH .. REACH, and ESCAPE
SYMBOLS = 2 * REACH + 2
ESCAPE = SYMBOLS - 1  # followed by the number as it is, in ESCAPE_BITS
ESCAPE_BITS = 15
LEAST_DEVIATION, LARGEST_DEVIATION = LEAST_CLASS - 12, LARGEST_CLASS + 12  # quarter octaves of a block's own s / d
ROWS = 32  # of a block
LANES = 8
GROUPS = ROWS // LANES
TOGETHER = 4  # blocks that are decoded at the same time
FINEST, COARSEST = 8, 24
"""How much finer and coarser than calibrated a block's steps may be, in eighths of an octave. A block that needs even
coarser ones is unlike anything calibrated, and is not coded."""
HEAD_WORDS = 1 + 2 * LANES
_LEAST_STATE = 1 << 15
_MASK = (1 << PROBABILITY_BITS) - 1
_ESCAPED = 1 << (ESCAPE_BITS - 1)
_POWERS = np.exp2(np.arange(-160, 160) / 4)  # of 2, by quarter octaves: all that a byte and coarser steps may say


Bits = NDArray[Any]  # of bf16 as uint16, or of fp32 as uint32; a segment's words as uint16


class Tables(NamedTuple):
    """The entropy coder's tables by class, as `kernels.codecs.symbols` computes them. Frequencies of a class add up to
    2^PROBABILITY_BITS."""

    frequencies: Words  # [classes, SYMBOLS]; 0: escaped
    starts: Words  # [classes, SYMBOLS], sums of the frequencies before
    entries: Words  # [classes, 2^PROBABILITY_BITS]: symbol, frequency << 8, distance from the start << 20
    values: Fp32  # [classes, SYMBOLS], in steps: the mean of what rounds to this symbol
    costs: Fp32
    """[classes, deviations]: mean bits of a number coded by a class, if it deviates as LEAST_DEVIATION + i says."""


class Layer(NamedTuple):
    """What was calibrated for a layer. K has n components, V has m numbers a row in `heads` heads.
    into [n, width]: rows of K, less their mean, to components; back [n, width]: components, in steps, to K; width is n,
    rounded up to whole tiles with zeros. classes [n + m]: of
    each component at the calibrated step, K's in falling order."""

    k_mean: Fp32
    v_mean: Fp32
    into: Fp32
    back: Fp32
    classes: Int64
    v_step: float
    heads: int


class Scratch(NamedTuple):
    """A thread's own room for one block."""

    rows: Fp32  # [ROWS, n + m]
    components: Fp32  # [TOGETHER, n + m, ROWS], in steps; encoding uses the first
    product: Fp32  # [ROWS, width], or its like
    deviations: Int64  # [n + m], in quarter octaves
    words: Words  # [TOGETHER, words]: streams while they are made, from their end; 3 * ROWS longer than they may be
    states: Words  # [TOGETHER, LANES]
    places: Int64  # [TOGETHER], of the next word of a stream
    chosen: Int64  # [TOGETHER, 3]: which side, which table, how many low bits
    live: Int64  # [TOGETHER]: from which component on all of K's are zero
    coarser: Int64  # [TOGETHER], eighths of an octave
    finer: Fp32  # [TOGETHER], by which numbers are multiplied for that


TILE = 8, 32  # rows and columns of a product that are summed in registers
_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
_VEC, _WORDS = (ir.VectorType(kind, 16) for kind in (_F32, _I32))
_LANES_F32, _LANES_I32 = (ir.VectorType(kind, LANES) for kind in (_F32, _I32))


@intrinsic
def _multiply_tile(
    _: Any,
    x: types.Type,
    x_at: types.Type,
    x_step: types.Type,
    y: types.Type,
    y_at: types.Type,
    y_step: types.Type,
    count: types.Type,
    out: types.Type,
    out_at: types.Type,
    out_step: types.Type,
) -> Any:
    """Set out[i, j] to the sum over c < count of x[c, i] * y[c, j], for a TILE of i and j. Arrays are fp32 of one axis,
    with the element at which a tile begins, and the elements from one row to the next."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = [context.make_array(signature.args[i])(context, b, args[i]).data for i in (0, 3, 7)]
        (x, y, out), (_, x_at, x_step, _, y_at, y_step, count, _, out_at, out_step) = arrays, args
        fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
        zeros, mask = ir.Constant(_VEC, [0.0] * 16), ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
        rows, vectors = range(TILE[0]), range(TILE[1] // 16)

        def vector_at(base: Any, at: Any) -> Any:
            return b.bitcast(b.gep(base, [at]), _VEC.as_pointer())

        sums = [[cgutils.alloca_once_value(b, zeros) for _ in vectors] for _ in rows]
        for row in sums:
            for total in row:
                b.store(zeros, total)
        with cgutils.for_range(b, count) as loop:
            x_row, y_row = (b.add(at, b.mul(step, loop.index)) for at, step in ((x_at, x_step), (y_at, y_step)))
            columns = [b.load(vector_at(y, b.add(y_row, _I64(16 * v))), align=4) for v in vectors]
            for i in rows:
                one = b.load(b.gep(x, [b.add(x_row, _I64(i))]))
                one = b.shuffle_vector(b.insert_element(ir.Constant(_VEC, ir.Undefined), one, _I64(0)), zeros, mask)
                for v in vectors:
                    b.store(b.call(fma, [one, columns[v], b.load(sums[i][v])]), sums[i][v])
        for i in rows:
            for v in vectors:
                to = b.add(b.add(out_at, b.mul(out_step, _I64(i))), _I64(16 * v))
                b.store(b.load(sums[i][v]), vector_at(out, to), align=4)
        return context.get_dummy_value()

    size = types.int64
    return types.void(x, size, size, y, size, size, size, out, size, size), generate


def _store_rounded(b: Any, x: Any, pointer: Any) -> None:
    """Store fp32 numbers as they are, or rounded to bf16, ties to even, by what `pointer` points to."""
    kind = pointer.type.pointee
    whole = b.bitcast(x, _WORDS)
    if kind.width == 16:
        half, one, sixteen = (ir.Constant(_WORDS, [number] * 16) for number in (0x7FFF, 1, 16))
        even = b.and_(b.lshr(whole, sixteen), one)
        whole = b.trunc(b.lshr(b.add(b.add(whole, half), even), sixteen), ir.VectorType(_I16, 16))
    b.store(whole, b.bitcast(pointer, whole.type.as_pointer()), align=kind.width // 8)


def _splat(b: Any, scalar: Any) -> Any:
    one = b.insert_element(ir.Constant(_VEC, ir.Undefined), scalar, _I32(0))
    return b.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * 16))


@intrinsic
def _store_k(
    _: Any,
    product: types.Type,
    at: types.Type,
    means: types.Type,
    scale: types.Type,
    count: types.Type,
    raw: types.Type,
    raw_at: types.Type,
) -> Any:
    """Store mean + scale * product of a row, of the first numbers as far as they fill vectors."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        product, means, raw = (context.make_array(signature.args[i])(context, b, args[i]).data for i in (0, 2, 5))
        _, at, _, scale, count, _, raw_at = args
        factor = _splat(b, scale)

        def load(base: Any, offset: Any) -> Any:
            return b.load(b.bitcast(b.gep(base, [offset]), _VEC.as_pointer()), align=4)

        with cgutils.for_range(b, b.sdiv(count, _I64(16))) as loop:
            j = b.mul(loop.index, _I64(16))
            x = b.fadd(load(means, j), b.fmul(factor, load(product, b.add(at, j))))
            _store_rounded(b, x, b.gep(raw, [b.add(raw_at, j)]))
        return context.get_dummy_value()

    size = types.int64
    return types.void(product, size, means, types.float32, size, raw, size), generate


@intrinsic
def _store_v_tile(
    _: Any,
    numbers: types.Type,
    at: types.Type,
    scales: types.Type,
    scales_at: types.Type,
    means: types.Type,
    means_at: types.Type,
    raw: types.Type,
    raw_at: types.Type,
    raw_step: types.Type,
) -> Any:
    """Store mean + scale * number of 16 components and 16 rows, a row after the other. Each component's numbers are
    ROWS apart from the next one's; scales are the rows', means the components'."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = [context.make_array(signature.args[i])(context, b, args[i]).data for i in (0, 2, 4, 6)]
        (numbers, scales, means, raw), (_, at, _, scales_at, _, means_at, _, raw_at, raw_step) = arrays, args

        def load(base: Any, offset: Any) -> Any:
            return b.load(b.bitcast(b.gep(base, [offset]), _VEC.as_pointer()), align=4)

        factors, rows = load(scales, scales_at), []
        for i in range(16):
            mean = _splat(b, b.load(b.gep(means, [b.add(means_at, _I64(i))])))
            rows.append(b.fadd(mean, b.fmul(factors, load(numbers, b.add(at, _I64(i * ROWS))))))
        for r, row in enumerate(_transposed(b, rows)):
            _store_rounded(b, row, b.gep(raw, [b.add(raw_at, b.mul(raw_step, _I64(r)))]))
        return context.get_dummy_value()

    size = types.int64
    return types.void(numbers, size, scales, size, means, size, raw, size, size), generate


@intrinsic
def _spread_tile(
    _: Any,
    raw: types.Type,
    raw_at: types.Type,
    raw_step: types.Type,
    means: types.Type,
    means_at: types.Type,
    out: types.Type,
    at: types.Type,
) -> Any:
    """The way back: store the numbers of 16 rows less their means as components, each ROWS apart from the next one."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        raw, means, out = (context.make_array(signature.args[i])(context, b, args[i]).data for i in (0, 3, 5))
        _, raw_at, raw_step, _, means_at, _, at = args
        mean, rows = b.load(b.bitcast(b.gep(means, [means_at]), _VEC.as_pointer()), align=4), []
        for r in range(16):
            row = _load_widened(b, b.gep(raw, [b.add(raw_at, b.mul(raw_step, _I64(r)))]))
            rows.append(b.fsub(row, mean))
        for i, column in enumerate(_transposed(b, rows)):
            b.store(column, b.bitcast(b.gep(out, [b.add(at, _I64(i * ROWS))]), _VEC.as_pointer()), align=4)
        return context.get_dummy_value()

    size = types.int64
    return types.void(raw, size, size, means, size, out, size), generate


@intrinsic
def _row_energies(
    _: Any, numbers: types.Type, at: types.Type, count: types.Type, out: types.Type, out_at: types.Type
) -> Any:
    """Store the sums of the squares of `count` components of 16 rows."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        numbers, out = (context.make_array(signature.args[i])(context, b, args[i]).data for i in (0, 3))
        _, at, count, _, out_at = args
        total = cgutils.alloca_once_value(b, ir.Constant(_VEC, [0.0] * 16))
        b.store(ir.Constant(_VEC, [0.0] * 16), total)
        with cgutils.for_range(b, count) as loop:
            place = b.gep(numbers, [b.add(at, b.mul(loop.index, _I64(ROWS)))])
            x = b.load(b.bitcast(place, _VEC.as_pointer()), align=4)
            b.store(b.fadd(b.load(total), b.fmul(x, x)), total)
        b.store(b.load(total), b.bitcast(b.gep(out, [out_at]), _VEC.as_pointer()), align=4)
        return context.get_dummy_value()

    size = types.int64
    return types.void(numbers, size, size, out, size), generate


@intrinsic
def _scale_rows(
    _: Any, numbers: types.Type, at: types.Type, count: types.Type, scales: types.Type, scales_at: types.Type
) -> Any:
    """Multiply `count` components of 16 rows by the rows' scales."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        numbers, scales = (context.make_array(signature.args[i])(context, b, args[i]).data for i in (0, 3))
        _, at, count, _, scales_at = args
        factors = b.load(b.bitcast(b.gep(scales, [scales_at]), _VEC.as_pointer()), align=4)
        with cgutils.for_range(b, count) as loop:
            place = b.bitcast(b.gep(numbers, [b.add(at, b.mul(loop.index, _I64(ROWS)))]), _VEC.as_pointer())
            b.store(b.fmul(b.load(place, align=4), factors), place, align=4)
        return context.get_dummy_value()

    size = types.int64
    return types.void(numbers, size, size, scales, size), generate


@intrinsic
def _energy(_: Any, numbers: types.Type, at: types.Type) -> Any:
    """Return the sum of the squares of ROWS numbers, added in one order on every machine."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        numbers = context.make_array(signature.args[0])(context, b, args[0]).data
        parts = []
        for half in range(0, ROWS, 16):
            x = b.load(b.bitcast(b.gep(numbers, [b.add(args[1], _I64(half))]), _VEC.as_pointer()), align=4)
            parts.append(b.fmul(x, x))
        total = functools.reduce(b.fadd, parts)
        for count in (8, 4, 2, 1):
            kind = ir.VectorType(_I32, count)
            lower, upper = (ir.Constant(kind, list(range(at, at + count))) for at in (0, count))
            total = b.fadd(b.shuffle_vector(total, total, lower), b.shuffle_vector(total, total, upper))
        return b.extract_element(total, _I64(0))

    return types.float32(numbers, types.int64), generate


def _load_widened(b: Any, pointer: Any) -> Any:
    """Load 16 numbers of fp32 or bf16 as fp32, by what `pointer` points to."""
    kind = pointer.type.pointee
    whole = b.load(b.bitcast(pointer, ir.VectorType(kind, 16).as_pointer()), align=kind.width // 8)
    if kind.width == 16:
        whole = b.shl(b.zext(whole, _WORDS), ir.Constant(_WORDS, [16] * 16))
    return b.bitcast(whole, _VEC)


def _transposed(b: Any, rows: list[Any]) -> list[Any]:
    """Exchange rows and lanes of 16 vectors, by squares that are twice as large each time."""
    rows = list(rows)
    for side in (1, 2, 4, 8):
        upper = [lane if not lane & side else lane - side + 16 for lane in range(16)]
        lower = [lane + side if not lane & side else lane + 16 for lane in range(16)]
        for i in range(16):
            if not i & side:
                pair = rows[i], rows[i + side]
                rows[i], rows[i + side] = (
                    b.shuffle_vector(*pair, ir.Constant(_WORDS, lanes)) for lanes in (upper, lower)
                )
    return rows


class _Stream:
    """Emits the decoding of one stream, a number of each lane at a time."""

    def __init__(
        self, b: Any, words: Any, entries: Any, values: Any, states: Any, place: Any, out: Any, low: Any, last: Any
    ) -> None:
        """Pointers to a segment's words, to its table, to the lanes' states, to the place of the next word, and to
        where numbers go; how many low bits are stored as they are, None for 0; and the last word."""
        self.b, self._words, self._entries, self._values, self._out, self._last = b, words, entries, values, out, last
        self._low = None if low is None else b.trunc(low, _I32)
        self._states, self._places = b.bitcast(states, _LANES_I32.as_pointer()), place
        self._state = cgutils.alloca_once_value(b, b.load(self._states, align=4))
        self._place = cgutils.alloca_once_value(b, b.load(self._places))

    def look(self) -> Any:
        """Look the lanes' symbols up. Returns whether `take` may go on: none is escaped, and there are words."""
        b = self.b
        self._x = b.load(self._state)
        slots = b.and_(self._x, _lanes(_MASK))
        self._entry = _gathered(b, _LANES_I32, self._entries, slots)
        self._symbol = b.and_(self._entry, _lanes(0xFF))
        is_escaped = b.icmp_unsigned("==", self._symbol, _lanes(ESCAPE))
        none = b.icmp_unsigned("==", b.bitcast(is_escaped, _I8), _I8(0))
        # All of the words may be taken, and then the place is that of a word still.
        end = b.add(b.load(self._place), _I64(LANES if self._low is None else 2 * LANES))
        return b.and_(none, b.icmp_signed("<=", end, self._last))

    def take(self, group: Any) -> None:
        """Store a group's numbers, and go on to the next states."""
        b = self.b
        frequency = b.and_(b.lshr(self._entry, _lanes(8)), _lanes(0xFFF))
        x = b.add(b.mul(frequency, b.lshr(self._x, _lanes(PROBABILITY_BITS))), b.lshr(self._entry, _lanes(20)))
        is_short = b.icmp_unsigned("<", x, _lanes(_LEAST_STATE))
        x = b.select(is_short, b.shl(x, _lanes(16)), x)
        value = _gathered(b, _LANES_F32, self._values, self._symbol)
        if self._low is None:
            b.store(b.or_(x, self._next_words(is_short)), self._state)
            number = value
        else:
            number = b.select(b.icmp_signed("==", self._low, _I32(0)), value, self._take_low(x, is_short))
        out = b.gep(self._out, [b.mul(group, _I64(LANES))])
        b.store(number, b.bitcast(out, _LANES_F32.as_pointer()), align=4)

    def _take_low(self, x: Any, is_short: Any) -> Any:
        """Go on from states that may lack their first word. A state takes another word when it is short again without
        its low bits; the first word does not change whether it is, as it is less than what the low bits leave. Returns
        the numbers."""
        b = self.b
        low, one = _splat_lanes(b, _LANES_I32, self._low), _lanes(1)
        is_short_again = b.icmp_unsigned("<", b.lshr(x, low), _lanes(_LEAST_STATE))
        turns = ir.Constant(_WORDS, [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])
        words = self._next_words(b.shuffle_vector(is_short, is_short_again, turns))
        first, again = (
            b.shuffle_vector(words, words, ir.Constant(_LANES_I32, list(range(odd, 2 * LANES, 2)))) for odd in (0, 1)
        )
        x = b.or_(x, first)
        rest = b.and_(x, b.sub(b.shl(one, low), one))
        x = b.lshr(x, low)
        b.store(b.select(is_short_again, b.or_(b.shl(x, _lanes(16)), again), x), self._state)
        whole = b.sub(b.shl(b.sub(self._symbol, _lanes(REACH)), low), b.lshr(b.shl(one, low), one))
        return b.sitofp(b.add(whole, rest), _LANES_F32)

    def _next_words(self, takes: Any) -> Any:
        """The next words of the stream, one for each that takes one, and 0 for the others."""
        b, count = self.b, takes.type.count
        place, bits = b.load(self._place), ir.IntType(count)
        taken = b.call(_declared(b, f"llvm.ctpop.i{count}", bits, [bits]), [b.bitcast(takes, bits)])
        b.store(b.add(place, b.zext(taken, _I64)), self._place)
        pointer = b.bitcast(b.gep(self._words, [place]), ir.VectorType(_I16, count).as_pointer())
        kind = ir.VectorType(_I32, count)
        expand = _declared(b, f"llvm.x86.avx512.mask.expand.v{count}i32", kind, [kind, kind, takes.type])
        return b.call(expand, [b.zext(b.load(pointer, align=2), kind), ir.Constant(kind, [0] * count), takes])

    def keep(self) -> None:
        """Store states and place."""
        self.b.store(self.b.load(self._state), self._states, align=4)
        self.b.store(self.b.load(self._place), self._places)


def _lanes(value: int) -> Any:
    return ir.Constant(_LANES_I32, [value] * LANES)


def _splat_lanes(b: Any, kind: Any, scalar: Any) -> Any:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return b.shuffle_vector(one, one, _lanes(0))


def _gathered(b: Any, kind: Any, table: Any, indices: Any) -> Any:
    """Load the elements of a table, of 32 bits, at each lane's index."""
    name, pointer = "d.d" if kind is _LANES_I32 else "d.ps", _I8.as_pointer()
    function = _declared(b, f"llvm.x86.avx2.gather.{name}.256", kind, [kind, pointer, _LANES_I32, kind, _I8])
    zeros, every = ir.Constant(kind, [0] * LANES), b.bitcast(_lanes(-1), kind)
    return b.call(function, [zeros, b.bitcast(table, pointer), indices, every, _I8(4)])


def _declared(b: Any, name: str, result: Any, kinds: list[Any]) -> Any:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, kinds), name)


def _vector_decoder(name: str, has_low: bool) -> Any:
    """Make what decodes the numbers of a component with vectors, with or without low bits."""

    def typed(
        _: Any,
        segments: types.Type,
        row: types.Type,
        last: types.Type,
        entries: types.Type,
        values: types.Type,
        states: types.Type,
        places: types.Type,
        components: types.Type,
        side_size: types.Type,
        chosen: types.Type,
        component: types.Type,
        group: types.Type,
    ) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            made = {i: context.make_array(signature.args[i])(context, b, args[i]) for i in (0, 3, 4, 5, 6, 7, 9)}
            entries, values, states, places, components, chosen = (made[i].data for i in (3, 4, 5, 6, 7, 9))
            _, row, last, *_, side_size, _, component, group = args
            row_bytes = cgutils.unpack_tuple(b, made[0].strides, 2)[0]
            streams = []
            for number in range(TOGETHER):
                side, table, low = (b.load(b.gep(chosen, [_I64(3 * number + i)])) for i in range(3))
                words = b.bitcast(made[0].data, _I8.as_pointer())
                words = b.bitcast(b.gep(words, [b.mul(b.add(row, side), row_bytes)]), _I16.as_pointer())
                streams.append(
                    _Stream(
                        b,
                        words=words,
                        entries=b.gep(entries, [b.mul(table, _I64(1 << PROBABILITY_BITS))]),
                        values=b.gep(values, [b.mul(table, _I64(SYMBOLS))]),
                        states=b.gep(states, [b.mul(side, _I64(LANES))]),
                        place=b.gep(places, [side]),
                        out=b.gep(components, [b.add(b.mul(side, side_size), b.mul(component, _I64(ROWS)))]),
                        low=low if has_low else None,
                        last=last,
                    )
                )
            at = cgutils.alloca_once_value(b, group)
            ahead, look, take, end = (b.append_basic_block(name) for name in ("ahead", "look", "take", "end"))
            b.branch(ahead)
            b.position_at_end(ahead)
            b.cbranch(b.icmp_signed("<", b.load(at), _I64(GROUPS)), look, end)
            b.position_at_end(look)
            b.cbranch(functools.reduce(b.and_, [stream.look() for stream in streams]), take, end)
            b.position_at_end(take)
            for stream in streams:
                stream.take(b.load(at))
            b.store(b.add(b.load(at), _I64(1)), at)
            b.branch(ahead)
            b.position_at_end(end)
            for stream in streams:
                stream.keep()
            return b.load(at)

        size = types.int64
        kinds = (segments, size, size, entries, values, states, places, components, size, chosen, size, size)
        return size(*kinds), generate

    typed.__name__ = name
    return intrinsic(typed)


_decode_plain, _decode_with_low = _vector_decoder("_decode_plain", False), _vector_decoder("_decode_with_low", True)


class _Writer:
    """Emits the encoding of one stream, a number of each lane at a time. Low bits and escapes are not for it."""

    def __init__(
        self, b: Any, words: Any, frequencies: Any, starts: Any, states: Any, place: Any, numbers: Any, finer: Any
    ) -> None:
        """Pointers to the stream, to its table, to the lanes' states, to the count of words, and to the numbers, which
        are multiplied by `finer`."""
        self.b, self._words, self._frequencies, self._starts, self._numbers = b, words, frequencies, starts, numbers
        self._finer = _splat_lanes(b, _LANES_F32, finer)
        self._states, self._places = b.bitcast(states, _LANES_I32.as_pointer()), place
        self._state = cgutils.alloca_once_value(b, b.load(self._states, align=4))
        self._place = cgutils.alloca_once_value(b, b.load(self._places))

    def look(self, group: Any) -> Any:
        """Round a group's numbers and look their symbols up. Returns whether none is escaped."""
        b = self.b
        at = b.bitcast(b.gep(self._numbers, [b.mul(group, _I64(LANES))]), _LANES_F32.as_pointer())
        x = b.fmul(b.load(at, align=4), self._finer)
        for predicate, bound in (("<", -_ESCAPED), (">", _ESCAPED - 1)):
            bounds = ir.Constant(_LANES_F32, [float(bound)] * LANES)
            x = b.select(b.fcmp_ordered(predicate, x, bounds), bounds, x)
        x = b.call(_declared(b, f"llvm.rint.v{LANES}f32", _LANES_F32, [_LANES_F32]), [x])
        symbol = b.add(b.fptosi(x, _LANES_I32), _lanes(REACH))
        is_far = b.icmp_unsigned(">=", symbol, _lanes(ESCAPE))
        self._symbol = b.select(is_far, _lanes(ESCAPE), symbol)
        self._frequency = _gathered(b, _LANES_I32, self._frequencies, self._symbol)
        is_escaped = b.or_(is_far, b.icmp_unsigned("==", self._frequency, _lanes(0)))
        return b.icmp_unsigned("==", b.bitcast(is_escaped, _I8), _I8(0))

    def take(self) -> None:
        """Code a group's numbers, the last lane's first."""
        b = self.b
        x, place = b.load(self._state), b.load(self._place)
        is_long = b.icmp_unsigned(">=", x, b.shl(self._frequency, _lanes(31 - PROBABILITY_BITS)))
        backwards = ir.Constant(_LANES_I32, list(range(LANES))[::-1])
        words, leaves = (b.shuffle_vector(v, v, backwards) for v in (b.and_(x, _lanes(0xFFFF)), is_long))
        compress = _declared(
            b, f"llvm.x86.avx512.mask.compress.v{LANES}i32", _LANES_I32, [_LANES_I32] * 2 + [leaves.type]
        )
        words = b.call(compress, [words, words, leaves])
        b.store(words, b.bitcast(b.gep(self._words, [place]), _LANES_I32.as_pointer()), align=4)
        count = b.call(_declared(b, "llvm.ctpop.i8", _I8, [_I8]), [b.bitcast(leaves, _I8)])
        b.store(b.add(place, b.zext(count, _I64)), self._place)
        x = b.select(is_long, b.lshr(x, _lanes(16)), x)
        # Both are less than 2^31, and as doubles their quotient never rounds up to a whole number.
        doubles = ir.VectorType(ir.DoubleType(), LANES)
        quotient = b.fptosi(b.fdiv(b.sitofp(x, doubles), b.sitofp(self._frequency, doubles)), _LANES_I32)
        rest = b.sub(x, b.mul(quotient, self._frequency))
        start = _gathered(b, _LANES_I32, self._starts, self._symbol)
        b.store(b.add(b.add(b.shl(quotient, _lanes(PROBABILITY_BITS)), rest), start), self._state)

    def keep(self) -> None:
        """Store states and count."""
        self.b.store(self.b.load(self._state), self._states, align=4)
        self.b.store(self.b.load(self._place), self._places)


@intrinsic
def _encode_vectors(
    _: Any,
    words: types.Type,
    frequencies: types.Type,
    starts: types.Type,
    states: types.Type,
    places: types.Type,
    components: types.Type,
    side_size: types.Type,
    chosen: types.Type,
    finer: types.Type,
    component: types.Type,
    group: types.Type,
) -> Any:
    """Encode a component of the chosen sides from this group down to the first. Returns the group at which it stopped,
    which it has left as it was: one in which a number is escaped, or -1."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        made = [context.make_array(signature.args[i])(context, b, args[i]) for i in (0, 1, 2, 3, 4, 5, 7, 8)]
        words, frequencies, starts, states, places, components, chosen, finer = (array.data for array in made)
        *_, component, group = args
        side_size, words_size = args[6], cgutils.unpack_tuple(b, made[0].shape, 2)[1]
        writers = []
        for number in range(TOGETHER):
            side, table = (b.load(b.gep(chosen, [_I64(3 * number + i)])) for i in range(2))
            table_at = b.mul(table, _I64(SYMBOLS))
            writers.append(
                _Writer(
                    b,
                    words=b.gep(words, [b.mul(side, words_size)]),
                    frequencies=b.gep(frequencies, [table_at]),
                    starts=b.gep(starts, [table_at]),
                    states=b.gep(states, [b.mul(side, _I64(LANES))]),
                    place=b.gep(places, [side]),
                    numbers=b.gep(components, [b.add(b.mul(side, side_size), b.mul(component, _I64(ROWS)))]),
                    finer=b.load(b.gep(finer, [side])),
                )
            )
        at = cgutils.alloca_once_value(b, group)
        ahead, look, take, end = (b.append_basic_block(name) for name in ("ahead", "look", "take", "end"))
        b.branch(ahead)
        b.position_at_end(ahead)
        b.cbranch(b.icmp_signed(">=", b.load(at), _I64(0)), look, end)
        b.position_at_end(look)
        b.cbranch(functools.reduce(b.and_, [writer.look(b.load(at)) for writer in writers]), take, end)
        b.position_at_end(take)
        for writer in writers:
            writer.take()
        b.store(b.sub(b.load(at), _I64(1)), at)
        b.branch(ahead)
        b.position_at_end(end)
        for writer in writers:
            writer.keep()
        return b.load(at)

    size = types.int64
    kinds = (words, frequencies, starts, states, places, components, size, chosen, finer, size, size)
    return size(*kinds), generate


def _has_vectors() -> bool:
    """Whether numba compiles for a processor with what `_Stream` and `_Writer` need; if it did not, LLVM would end the
    process. Not where every index is to be checked, since those work on pointers."""
    if config.BOUNDSCHECK:  # type: ignore[attr-defined]
        return False
    features = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
    return features >= {"+avx2", "+avx512f", "+avx512vl", "+avx512dq", "+avx512bw"}


@compiled()
def _decode_groups(
    segments: Bits, row: int, last: int, tables: Tables, scratch: Scratch, component: int, group: int, has_low: bool
) -> int:
    """Decode groups of a component for the chosen sides: what `_decode_group` does, eight lanes and TOGETHER sides at
    once. Returns the group at which it stopped: GROUPS, or one in which a number is escaped or a stream near its end,
    which it has left as it was."""
    components = scratch.components
    size = components.shape[1] * ROWS
    entries, values, states, places = tables.entries, tables.values, scratch.states, scratch.places
    chosen = scratch.chosen
    stopped: int
    if has_low:
        stopped = _decode_with_low(
            segments, row, last, entries, values, states, places, components, size, chosen, component, group
        )
    else:
        stopped = _decode_plain(
            segments, row, last, entries, values, states, places, components, size, chosen, component, group
        )
    return stopped


@compiled()
def _encode_groups(tables: Tables, scratch: Scratch, component: int, group: int) -> int:
    """Encode groups of a component for the chosen sides, none of which stores low bits: what `_encode_group` does,
    eight lanes and TOGETHER sides at once. Returns the group at which it stopped, which it has left as it was: one in
    which a number is escaped, or -1."""
    components = scratch.components
    size = components.shape[1] * ROWS
    frequencies, starts, states, places = tables.frequencies, tables.starts, scratch.states, scratch.places
    words, chosen, finer = scratch.words, scratch.chosen, scratch.finer
    stopped: int = _encode_vectors(
        words, frequencies, starts, states, places, components, size, chosen, finer, component, group
    )
    return stopped


if not _has_vectors():

    @compiled()
    def _encode_groups(tables: Tables, scratch: Scratch, component: int, group: int) -> int:
        """Encode none."""
        return group

    @compiled()
    def _decode_groups(
        segments: Bits, row: int, last: int, tables: Tables, scratch: Scratch, component: int, group: int, has_low: bool
    ) -> int:
        """Decode none."""
        return group


@compiled()
def _to_floats(bits: Bits, shift: int, out: Fp32) -> None:
    """bits [any] of bf16 (shift 16) or fp32 (shift 0)."""
    whole = out.view(np.uint32)
    for i in range(len(bits)):
        whole[i] = np.uint32(bits[i]) << np.uint32(shift)


@compiled()
def _to_bits(floats: Fp32, shift: int, out: Bits) -> None:
    """Round to bf16, ties to even, or keep fp32."""
    whole = floats.view(np.uint32)
    if shift == 0:
        for i in range(len(floats)):
            out[i] = whole[i]
        return
    for i in range(len(floats)):
        x = whole[i]
        out[i] = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@compiled()
def _quarters(coarser: int, is_v: bool) -> int:
    """Return how many quarter octaves the steps of K, or of V, are coarser: they take turns, V first."""
    return (coarser + is_v) >> 1


@compiled()
def _quarters_of(variance: float) -> int:
    """Return 4 * log2 of the deviation, rounded, of a finite variance above zero."""
    part, exponent = math.frexp(variance)  # of at least 1/2
    return int(2 * exponent - 2 + (part >= 2.0**-0.75) + (part >= 2.0**-0.25))


@compiled()
def class_of(base: int, quarters: int) -> tuple[int, int]:
    """Return the table, or -1 for none, and how many low bits are stored as they are."""
    c = base - quarters
    if c < LEAST_CLASS:
        return -1, 0
    low = 0
    if c > LARGEST_CLASS:
        low = (c - LARGEST_CLASS + 3) // 4
        c -= 4 * low
    return c - LEAST_CLASS, low


@compiled()
def decode(
    segments: Bits, size_words: int, tables: Tables, layer: Layer, shift: int, scratch: Scratch, raw: Bits
) -> None:
    """segments uint16 [blocks, size_words]; raw [blocks, ROWS * (n + m)] as bits."""
    n, m = len(layer.k_mean), len(layer.v_mean)
    for row in range(0, len(segments), TOGETHER):
        count = min(TOGETHER, len(segments) - row)
        _decode_numbers(segments, row, count, size_words - 1, n, tables, layer, scratch)
        for side in range(count):
            components, coarser, out = scratch.components[side], scratch.coarser[side], raw[row + side]
            _store_keys(layer, scratch, components, scratch.live[side], n, _quarters(coarser, 0), shift, out)
            words = segments[row + side]
            _store_values(words, layer, scratch, components, n, m, _quarters(coarser, 1), shift, out)


@compiled(parallel=True)
def decode_together(
    segments: Bits, size_words: int, tables: Tables, layer: Layer, shift: int, rooms: Scratch, raw: Bits
) -> None:
    """Like `decode`, with all threads of the team. rooms: arrays of as many rooms as there are parts of the work."""
    blocks, parts = len(segments), len(rooms.rows)
    for part in prange(parts):
        first, stop = blocks * part // parts, blocks * (part + 1) // parts
        room = Scratch(
            rooms.rows[part],
            rooms.components[part],
            rooms.product[part],
            rooms.deviations[part],
            rooms.words[part],
            rooms.states[part],
            rooms.places[part],
            rooms.chosen[part],
            rooms.live[part],
            rooms.coarser[part],
            rooms.finer[part],
        )
        decode(segments[first:stop], size_words, tables, layer, shift, room, raw[first:stop])


@compiled()
def _coarser(words: Bits) -> int:
    return min(int(words[0]) & 0xFF, FINEST + COARSEST) - FINEST


@compiled()
def _decode_numbers(
    segments: Bits, row: int, count: int, last: int, n: int, tables: Tables, layer: Layer, scratch: Scratch
) -> None:
    """Fill scratch.components and scratch.live from `count` segments. last: the last of a segment's words."""
    classes, chosen, live = layer.classes, scratch.chosen, scratch.live
    for side in range(count):
        words = segments[row + side]
        for lane in range(LANES):
            low, high = np.uint32(words[1 + 2 * lane]), np.uint32(words[2 + 2 * lane])
            scratch.states[side, lane] = low | high << np.uint32(16)
        scratch.places[side] = HEAD_WORDS + (ROWS * layer.heads + 1) // 2
        scratch.coarser[side] = _coarser(words)
        live[side] = n
    for c in range(len(classes)):
        used, has_low = 0, False
        for side in range(count):
            table, low = class_of(classes[c], _quarters(scratch.coarser[side], c >= n))
            if table < 0:
                scratch.components[side, c] = 0
                live[side] = min(live[side], c)
            else:
                chosen[used, 0], chosen[used, 1], chosen[used, 2] = side, table, low
                has_low |= low > 0
                used += 1
        if used == 0:
            continue
        # What has no numbers leaves its place to another one, which is decoded twice at the same time, to one place.
        for other in range(used, TOGETHER):
            chosen[other] = chosen[0]
        group = 0
        while group < GROUPS:
            group = _decode_groups(segments, row, last, tables, scratch, c, group, has_low)
            if group < GROUPS:
                for i in range(used):
                    _decode_group(
                        segments[row + chosen[i, 0]],
                        last,
                        tables,
                        scratch,
                        chosen[i, 0],
                        chosen[i, 1],
                        chosen[i, 2],
                        c,
                        group,
                    )
                group += 1


@compiled()
def _decode_group(
    words: Bits, last: int, tables: Tables, scratch: Scratch, side: int, table: int, low: int, c: int, group: int
) -> None:
    """Decode a number of each lane, one after the other: where vectors cannot, or there are none."""
    states, out = scratch.states[side], scratch.components[side, c]
    entries, values = tables.entries[table], tables.values[table]
    at = scratch.places[side]
    for lane in range(LANES):
        x = states[lane]
        entry = entries[x & np.uint32(_MASK)]
        symbol = entry & np.uint32(0xFF)
        x = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(PROBABILITY_BITS)) + (entry >> np.uint32(20))
        # Without a branch, which would be foretold wrong every third time.
        is_short = x < np.uint32(_LEAST_STATE)
        x = x << np.uint32(16 * is_short) | np.uint32(words[at] * is_short)
        at = min(at + is_short, last)
        number = values[symbol]
        bits = ESCAPE_BITS if symbol == ESCAPE else low
        if bits:
            rest = np.int64(x & np.uint32((1 << bits) - 1))
            x >>= np.uint32(bits)
            if x < _LEAST_STATE:
                x = x << np.uint32(16) | np.uint32(words[at])
                at = min(at + 1, last)
            if symbol == ESCAPE:
                number = np.float32(rest - _ESCAPED)
            else:
                number = np.float32((np.int64(symbol) - REACH) * (1 << low) + rest - (1 << low >> 1))
        states[lane] = x
        out[group * LANES + lane] = number
    scratch.places[side] = at


@compiled()
def _store_keys(
    layer: Layer, scratch: Scratch, components: Fp32, live: int, n: int, quarters: int, shift: int, raw: Bits
) -> None:
    """live: the components from here on are zero in every row."""
    rows, columns = TILE
    width = layer.back.shape[1]
    flat, back, product = components.reshape(-1), layer.back.reshape(-1), scratch.product.reshape(-1)
    scale = np.float32(2.0 ** (quarters / 4))
    for r in range(0, ROWS, rows):
        for j in range(0, width, columns):
            _multiply_tile(flat, r, ROWS, back, j, width, live, product, r * width + j, width)
    for r in range(ROWS):
        _store_k(product, r * width, layer.k_mean, scale, n, raw, r * n)
        for j in range(n - n % 16, n):
            scratch.rows[0, j] = layer.k_mean[j] + scale * scratch.product[r, j]
            _to_bits(scratch.rows[0, j : j + 1], shift, raw[r * n + j : r * n + j + 1])


@compiled()
def _store_values(
    words: Bits, layer: Layer, scratch: Scratch, components: Fp32, n: int, m: int, quarters: int, shift: int, raw: Bits
) -> None:
    heads, width = layer.heads, m // layer.heads
    exponents, scales = words[HEAD_WORDS:].view(np.int8), scratch.product.reshape(-1)
    flat = components.reshape(-1)
    for head in range(heads):
        for r in range(ROWS):
            quarter = exponents[r * heads + head] + quarters
            scales[r] = np.float32(layer.v_step * _POWERS[quarter + len(_POWERS) // 2])
        first, last = head * width, (head + 1) * width
        tiled = first + width // 16 * 16
        for r in range(0, ROWS, 16):
            for i in range(first, tiled, 16):
                at = ROWS * n + r * m + i
                _store_v_tile(flat, (n + i) * ROWS + r, scales, r, layer.v_mean, i, raw, at, m)
        for i in range(tiled, last):
            for r in range(ROWS):
                at = ROWS * n + r * m + i
                scratch.rows[0, 0] = layer.v_mean[i] + scales[r] * components[n + i, r]
                _to_bits(scratch.rows[0, :1], shift, raw[at : at + 1])


@compiled()
def encode(
    raw: Bits,
    shift: int,
    size_words: int,
    tables: Tables,
    layer: Layer,
    scratch: Scratch,
    segments: Bits,
    encoded: NDArray[np.bool_],
) -> None:
    """raw [blocks, ROWS * (n + m)] as bits; segments uint16 [blocks, size_words]; encoded bool [blocks]."""
    n, m = len(layer.k_mean), len(layer.v_mean)
    begin = HEAD_WORDS + (ROWS * layer.heads + 1) // 2
    room = size_words - begin
    encoded[:] = False
    for row in range(0, len(raw), TOGETHER):
        count = min(TOGETHER, len(raw) - row)
        for side in range(count):
            words, components = segments[row + side], scratch.components[side]
            words[:] = 0
            is_finite = _k_to_components(raw[row + side], shift, layer, scratch, components, n)
            is_finite &= _v_to_components(raw[row + side], shift, words, layer, scratch, components, n, m)
            coarser = COARSEST + 1
            if is_finite:
                coarser = _finest(n, tables, layer, scratch, room * 16)
            scratch.coarser[side] = coarser
        while _encode_numbers(count, room, n, tables, layer, scratch):
            for side in range(count):
                if scratch.coarser[side] > COARSEST:
                    continue
                used = scratch.places[side]
                if used > room:
                    scratch.coarser[side] += 1
                    continue
                words = segments[row + side]
                words[0] = scratch.coarser[side] + FINEST
                for lane in range(LANES):
                    words[1 + 2 * lane] = scratch.states[side, lane] & np.uint32(0xFFFF)
                    words[2 + 2 * lane] = scratch.states[side, lane] >> np.uint32(16)
                for i in range(used):
                    words[begin + i] = scratch.words[side, used - 1 - i]
                encoded[row + side] = True
                scratch.coarser[side] = COARSEST + 1


@compiled()
def _spread(
    raw: Bits, first: int, step: int, count: int, shift: int, means: Fp32, scratch: Scratch, out: Fp32, at: int
) -> None:
    """Store a block's rows less their means as components, from out[at] on. A row's numbers begin `step` after those of
    the row before."""
    for r in range(0, ROWS, 16):
        for i in range(0, count - count % 16, 16):
            _spread_tile(raw, first + r * step + i, step, means, i, out, at + i * ROWS + r)
    for i in range(count - count % 16, count):
        for r in range(ROWS):
            place = first + r * step + i
            _to_floats(raw[place : place + 1], shift, scratch.rows[0, :1])
            out[at + i * ROWS + r] = scratch.rows[0, 0] - means[i]


@compiled()
def _k_to_components(raw: Bits, shift: int, layer: Layer, scratch: Scratch, components: Fp32, n: int) -> bool:
    """Also note how much each component deviates, in quarter octaves. Returns whether all are finite."""
    rows, _ = TILE
    width = layer.into.shape[1]
    centred, into, out = scratch.product.reshape(-1), layer.into.reshape(-1), components.reshape(-1)
    _spread(raw, 0, n, n, shift, layer.k_mean, scratch, centred, 0)
    for j in range(0, width, rows):  # rows of the result are components, its columns a block's rows
        _multiply_tile(into, j, width, centred, 0, ROWS, n, out, j * ROWS, ROWS)
    return bool(_deviations(components, scratch, 0, n))


@compiled()
def _v_to_components(
    raw: Bits, shift: int, words: Bits, layer: Layer, scratch: Scratch, components: Fp32, n: int, m: int
) -> bool:
    """Also write the scales' exponents, and note how much each component deviates. Returns whether all are finite."""
    heads, width = layer.heads, m // layer.heads
    exponents, scales = words[HEAD_WORDS:].view(np.int8), scratch.product.reshape(-1)
    flat = components.reshape(-1)
    _spread(raw, ROWS * n, m, m, shift, layer.v_mean, scratch, flat, n * ROWS)
    for head in range(heads):
        at = (n + head * width) * ROWS
        for r in range(0, ROWS, 16):
            _row_energies(flat, at + r, width, scales, r)
        for r in range(ROWS):
            energy = scales[r]
            if not np.isfinite(energy):
                return False
            quarter = min(max(_quarters_of(max(energy / width, np.float32(1e-18))), -127), 127)
            exponents[r * heads + head] = quarter
            scales[r] = np.float32(1 / (layer.v_step * _POWERS[quarter + len(_POWERS) // 2]))
        for r in range(0, ROWS, 16):
            _scale_rows(flat, at + r, width, scales, r)
    return bool(_deviations(components, scratch, n, n + m))


@compiled()
def _deviations(components: Fp32, scratch: Scratch, first: int, last: int) -> bool:
    """Note how much components deviate in this block. Returns whether all are finite."""
    flat = components.reshape(-1)
    total = np.float32(0)
    for c in range(first, last):
        energy = _energy(flat, c * ROWS)
        total += energy
        if np.isfinite(energy):
            scratch.deviations[c] = _quarters_of(max(energy / ROWS, np.float32(1e-12)))
    return bool(np.isfinite(total))


@compiled()
def _finest(n: int, tables: Tables, layer: Layer, scratch: Scratch, bits: int) -> int:
    """Predict the finest steps whose code fits in so many bits, from how much each component deviates in this block."""
    coarser = 0
    if _predicted(coarser, n, tables, layer, scratch) <= bits:
        while coarser > -FINEST and _predicted(coarser - 1, n, tables, layer, scratch) <= bits:
            coarser -= 1
        return coarser
    while coarser < COARSEST and _predicted(coarser, n, tables, layer, scratch) > bits:
        coarser += 1
    return coarser


@compiled()
def _predicted(coarser: int, n: int, tables: Tables, layer: Layer, scratch: Scratch) -> float:
    """Return the bits of a block's numbers with such steps."""
    total = np.float32(0)
    for c in range(len(layer.classes)):
        quarters = _quarters(coarser, c >= n)
        table, low = class_of(layer.classes[c], quarters)
        if table >= 0:
            own = scratch.deviations[c] - quarters - 4 * low
            own = min(max(own, LEAST_DEVIATION), LARGEST_DEVIATION) - LEAST_DEVIATION
            total += np.float32(low) + tables.costs[table, own]
    return float(total * ROWS)


@compiled()
def _encode_numbers(count: int, room: int, n: int, tables: Tables, layer: Layer, scratch: Scratch) -> bool:
    """Code the numbers of those sides whose steps are not too coarse, from the last to the first. Notes the count of
    words of each; one of more than `room` has broken off. Returns whether there were any."""
    classes, chosen, places = layer.classes, scratch.chosen, scratch.places
    for side in range(count):
        scratch.states[side] = _LEAST_STATE
        places[side] = 0
    any_left = False
    for c in range(len(classes) - 1, -1, -1):
        used, has_low = 0, False
        for side in range(count):
            if scratch.coarser[side] > COARSEST or places[side] > room:
                continue
            any_left = True
            quarters = _quarters(scratch.coarser[side], c >= n)
            table, low = class_of(classes[c], quarters)
            if table >= 0:
                chosen[used, 0], chosen[used, 1], chosen[used, 2] = side, table, low
                scratch.finer[side] = np.float32(_POWERS[len(_POWERS) // 2 - quarters])
                has_low |= low > 0
                used += 1
        if used == 0:
            continue
        for other in range(used, TOGETHER):  # as in decoding
            chosen[other] = chosen[0]
        group = GROUPS - 1
        while group >= 0:
            if not has_low:
                group = _encode_groups(tables, scratch, c, group)
            if group >= 0:
                for i in range(used):
                    _encode_group(tables, scratch, chosen[i, 0], chosen[i, 1], chosen[i, 2], c, group)
                group -= 1
    return any_left


@compiled()
def _encode_group(tables: Tables, scratch: Scratch, side: int, table: int, low: int, c: int, group: int) -> None:
    """Code a number of each lane, the last one first: where vectors cannot, or there are none."""
    states, out, used = scratch.states[side], scratch.words[side], scratch.places[side]
    frequencies, starts = tables.frequencies[table], tables.starts[table]
    half, finer = 1 << low >> 1, scratch.finer[side]
    for lane in range(LANES - 1, -1, -1):
        x = states[lane]
        number = int(np.rint(scratch.components[side, c, group * LANES + lane] * finer))
        number = min(max(number, -_ESCAPED), _ESCAPED - 1)
        symbol = ((number + half) >> low) + REACH
        if symbol < 0 or symbol >= ESCAPE or frequencies[symbol] == 0:
            bits, rest, symbol = ESCAPE_BITS, number + _ESCAPED, ESCAPE
        else:
            bits, rest = low, (number + half) & ((1 << low) - 1)
        if bits > 0:
            if x >= np.uint32(1) << np.uint32(31 - bits):
                out[used] = x & np.uint32(0xFFFF)
                used += 1
                x >>= np.uint32(16)
            x = x << np.uint32(bits) | np.uint32(rest)
        frequency = frequencies[symbol]
        if x >= frequency << np.uint32(31 - PROBABILITY_BITS):
            out[used] = x & np.uint32(0xFFFF)
            used += 1
            x >>= np.uint32(16)
        quotient = x // frequency
        states[lane] = (quotient << np.uint32(PROBABILITY_BITS)) + (x - quotient * frequency) + starts[symbol]
    scratch.places[side] = used
