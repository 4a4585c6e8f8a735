"""Transform coding of a layer's blocks, compiled by numba: rows to components and whole numbers, those to a stream of
constant size by an entropy coder (rANS, Duda 2013: https://arxiv.org/abs/1311.2540), and back.

A segment, as uint16 words in little-endian order:

    word 0           how many eighths of an octave the steps are coarser than calibrated, plus FINEST
    words 1 .. 16    the coder's LANES final states, low word first
    then             an exponent for each row and head of V, a byte each: V is scaled by 2^(exponent / 4)
    then             the coder's words, in the order in which decoding reads them, and zeros

Component by component, 32 rows at a time; row r belongs to lane r mod LANES. With AVX-512 the eight lanes of a block
are one vector, and TOGETHER blocks are coded at the same time, so that their chains of dependent instructions overlap;
elsewhere, and where a number is escaped, the lanes take turns. The bytes are the same. Import this through
`kernels.codecs.transform`.

What emits vectors stands here and not beside that of the other kernels, because numba's disk cache notices changes only
in the file of the compiled function.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import config, prange, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numpy.typing import NDArray

from kernels.cpu.emit import compiled, intrinsic
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
TOGETHER = 4  # blocks that are coded at the same time
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
    """A thread's own room for the blocks that it codes at the same time, its sides."""

    number: Fp32  # [1], one of those that fill no vector
    components: Fp32  # [TOGETHER, n + m, ROWS], in steps
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
_LANES_F32, _LANES_I32, _LANES_F64 = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, ir.DoubleType()))


# --- vectors ----------------------------------------------------------------------------------------------------------


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
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=_bytes(kind))

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=_bytes(value.type))

    def splat(self, scalar: Any, kind: Any = _VEC) -> Any:
        if isinstance(scalar, (int, float)):
            return ir.Constant(kind, [scalar] * kind.count)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count))

    def shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))

    def variable(self, value: Any) -> Any:
        """Create what loops may change."""
        place = cgutils.alloca_once_value(self.b, value)
        self.b.store(value, place)  # each time that this is come by, not only at the function's begin
        return place

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def load_widened(self, pointer: Any) -> Any:
        """Load 16 numbers of fp32 or bf16 as fp32, by what `pointer` points to."""
        kind = pointer.type.pointee
        whole = self.load(pointer, ir.VectorType(kind, 16))
        if kind.width == 16:
            whole = self.b.shl(self.b.zext(whole, _WORDS), self.splat(16, _WORDS))
        return self.b.bitcast(whole, _VEC)

    def store_rounded(self, x: Any, pointer: Any) -> None:
        """Store 16 numbers as fp32, or rounded to bf16, ties to even, by what `pointer` points to."""
        b, whole = self.b, self.b.bitcast(x, _WORDS)
        if pointer.type.pointee.width == 16:
            even = b.and_(b.lshr(whole, self.splat(16, _WORDS)), self.splat(1, _WORDS))
            whole = b.add(b.add(whole, self.splat(0x7FFF, _WORDS)), even)
            whole = b.trunc(b.lshr(whole, self.splat(16, _WORDS)), ir.VectorType(_I16, 16))
        self.store(whole, pointer)

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """Exchange rows and lanes of 16 vectors, by squares that are twice as large each time."""
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
        name = "d.d" if kind is _LANES_I32 else "d.ps"
        zeros, every = self.splat(0, kind), self.b.bitcast(self.splat(-1, _LANES_I32), kind)
        base = self.b.bitcast(table, _I8.as_pointer())
        return self.call(f"llvm.x86.avx2.gather.{name}.256", kind, zeros, base, indices, every, _I8(4))

    def count(self, lanes: Any) -> Any:
        """Count the lanes that are true."""
        bits = ir.IntType(lanes.type.count)
        found = self.call(f"llvm.ctpop.i{bits.width}", bits, self.b.bitcast(lanes, bits))
        return self.b.zext(found, _I64)

    def none(self, lanes: Any) -> Any:
        return self.b.icmp_unsigned("==", self.b.bitcast(lanes, _I8), _I8(0))


def _bytes(kind: Any) -> int:
    """Return the size of an element of a vector."""
    return 4 if kind.element is _F32 else int(kind.element.width) // 8


def _vectors(gives: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Turn an emitter of vector code into a function for compiled code, which returns the numba type `gives`. The
    emitter receives an array argument as its pointer."""

    def made(emit: Callable[..., Any]) -> Any:
        def typed(_: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                values = [
                    context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
                    for kind, arg in zip(signature.args, args, strict=True)
                ]
                result = emit(_Emit(builder), *values)
                return context.get_dummy_value() if gives is None else result

            wanted = [types.int64 if isinstance(kind, types.Integer) else kind for kind in kinds]
            return (types.void if gives is None else gives)(*wanted), generate

        typed.__name__, typed.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return made


@_vectors()
def _multiply_tile(
    e: _Emit,
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
    """Set out[i, j] to the sum over c < count of x[c, i] * y[c, j], for a TILE of i and j. Arrays are fp32 of one axis,
    with the element at which a tile begins, and the elements from one row to the next."""
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
                e.b.store(e.call("llvm.fma.v16f32", _VEC, one, columns[v], e.b.load(sums[i][v])), sums[i][v])
    for i in rows:
        for v in vectors:
            e.store(e.b.load(sums[i][v]), e.at(out, out_at, e.times(out_step, i), 16 * v))


@_vectors()
def _store_k(
    e: _Emit,
    product: ir.Value,
    at: ir.Value,
    means: ir.Value,
    scale: ir.Value,
    count: ir.Value,
    raw: ir.Value,
    raw_at: ir.Value,
) -> None:
    """Store mean + scale * product of a row, of the first numbers as far as they fill vectors."""
    factor = e.splat(scale)
    with cgutils.for_range(e.b, e.b.sdiv(count, _I64(16))) as loop:
        j = e.times(loop.index, 16)
        x = e.b.fadd(e.load(e.at(means, j)), e.b.fmul(factor, e.load(e.at(product, at, j))))
        e.store_rounded(x, e.at(raw, raw_at, j))


@_vectors()
def _store_v_tile(
    e: _Emit,
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
    """Store mean + scale * number of 16 components and 16 rows, a row after the other. Each component's numbers are
    ROWS apart from the next one's; scales are the rows', means the components'."""
    factors, columns = e.load(e.at(scales, scales_at)), []
    for i in range(16):
        mean = e.splat(e.b.load(e.at(means, means_at, i)))
        columns.append(e.b.fadd(mean, e.b.fmul(factors, e.load(e.at(numbers, at, i * ROWS)))))
    for r, row in enumerate(e.transposed(columns)):
        e.store_rounded(row, e.at(raw, raw_at, e.times(raw_step, r)))


@_vectors()
def _spread_tile(
    e: _Emit,
    raw: ir.Value,
    raw_at: ir.Value,
    raw_step: ir.Value,
    means: ir.Value,
    means_at: ir.Value,
    out: ir.Value,
    at: ir.Value,
) -> None:
    """The way back: store the numbers of 16 rows less their means as components, each ROWS apart from the next one."""
    mean = e.load(e.at(means, means_at))
    rows = [e.b.fsub(e.load_widened(e.at(raw, raw_at, e.times(raw_step, r))), mean) for r in range(16)]
    for i, column in enumerate(e.transposed(rows)):
        e.store(column, e.at(out, at, i * ROWS))


@_vectors()
def _row_energies(e: _Emit, numbers: ir.Value, at: ir.Value, count: ir.Value, out: ir.Value, out_at: ir.Value) -> None:
    """Store the sums of the squares of `count` components of 16 rows."""
    total = e.variable(e.splat(0.0))
    with cgutils.for_range(e.b, count) as loop:
        x = e.load(e.at(numbers, at, e.times(loop.index, ROWS)))
        e.b.store(e.b.fadd(e.b.load(total), e.b.fmul(x, x)), total)
    e.store(e.b.load(total), e.at(out, out_at))


@_vectors()
def _scale_rows(
    e: _Emit, numbers: ir.Value, at: ir.Value, count: ir.Value, scales: ir.Value, scales_at: ir.Value
) -> None:
    """Multiply `count` components of 16 rows by the rows' scales."""
    factors = e.load(e.at(scales, scales_at))
    with cgutils.for_range(e.b, count) as loop:
        place = e.at(numbers, at, e.times(loop.index, ROWS))
        e.store(e.b.fmul(e.load(place), factors), place)


@_vectors(types.float32)
def _energy(e: _Emit, numbers: ir.Value, at: ir.Value) -> ir.Value:
    """Return the sum of the squares of ROWS numbers, added in one order on every machine."""
    vectors = [e.load(e.at(numbers, at, half)) for half in range(0, ROWS, 16)]
    total = functools.reduce(e.b.fadd, [e.b.fmul(x, x) for x in vectors])
    for count in (8, 4, 2, 1):
        total = e.b.fadd(e.shuffle(total, total, range(count)), e.shuffle(total, total, range(count, 2 * count)))
    return e.b.extract_element(total, _I64(0))


# --- streams ----------------------------------------------------------------------------------------------------------


class _Stream:
    """The lanes' states and the place in the words, which stay in registers until `keep`."""

    def __init__(self, e: _Emit, words: Any, states: Any, place: Any) -> None:
        """Pointers to the words, to the lanes' states, and to the place of the next word."""
        self._e, self._words, self._states, self._places = e, words, states, place
        self._state, self._place = e.variable(e.load(states, _LANES_I32)), e.variable(e.b.load(place))

    def keep(self) -> None:
        """Store states and place."""
        self._e.store(self._e.b.load(self._state), self._states)
        self._e.b.store(self._e.b.load(self._place), self._places)


class _Reader(_Stream):
    """Emits the decoding of one stream, a number of each lane at a time."""

    def __init__(self, *stream: Any, entries: Any, values: Any, out: Any, low: Any, last: Any) -> None:
        """stream: see `_Stream`; pointers to its table, and to where numbers go; how many low bits are stored as they
        are, None for 0; and the last word."""
        super().__init__(*stream)
        self._entries, self._values, self._out, self._last = entries, values, out, last
        self._low = None if low is None else self._e.b.trunc(low, _I32)

    def look(self, group: Any) -> Any:
        """Look the lanes' symbols up. Returns whether `take` may go on: none is escaped, and there are words."""
        e, b = self._e, self._e.b
        self._group, self._x = group, b.load(self._state)
        self._entry = e.gather(_LANES_I32, self._entries, b.and_(self._x, _lanes(_MASK)))
        self._symbol = b.and_(self._entry, _lanes(0xFF))
        is_plain = e.none(b.icmp_unsigned("==", self._symbol, _lanes(ESCAPE)))
        # All of the words may be taken, and then the place is that of a word still.
        end = b.add(b.load(self._place), _I64(LANES if self._low is None else 2 * LANES))
        return b.and_(is_plain, b.icmp_signed("<=", end, self._last))

    def take(self) -> None:
        """Store a group's numbers, and go on to the next states."""
        e, b = self._e, self._e.b
        frequency = b.and_(b.lshr(self._entry, _lanes(8)), _lanes(0xFFF))
        x = b.add(b.mul(frequency, b.lshr(self._x, _lanes(PROBABILITY_BITS))), b.lshr(self._entry, _lanes(20)))
        is_short = b.icmp_unsigned("<", x, _lanes(_LEAST_STATE))
        x = b.select(is_short, b.shl(x, _lanes(16)), x)
        number = e.gather(_LANES_F32, self._values, self._symbol)
        if self._low is None:
            b.store(b.or_(x, self._next_words(is_short)), self._state)
        else:
            number = b.select(b.icmp_signed("==", self._low, _I32(0)), number, self._take_low(x, is_short))
        e.store(number, e.at(self._out, e.times(self._group, LANES)))

    def _take_low(self, x: Any, is_short: Any) -> Any:
        """Go on from states that may lack their first word. A state takes another word when it is short again without
        its low bits; the first word does not change whether it is, as it is less than what the low bits leave. Returns
        the numbers."""
        e, b = self._e, self._e.b
        low, one = e.splat(self._low, _LANES_I32), _lanes(1)
        is_short_again = b.icmp_unsigned("<", b.lshr(x, low), _lanes(_LEAST_STATE))
        turns = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
        words = self._next_words(e.shuffle(is_short, is_short_again, turns))
        first, again = (e.shuffle(words, words, range(odd, 2 * LANES, 2)) for odd in (0, 1))
        x = b.or_(x, first)
        rest = b.and_(x, b.sub(b.shl(one, low), one))
        x = b.lshr(x, low)
        b.store(b.select(is_short_again, b.or_(b.shl(x, _lanes(16)), again), x), self._state)
        whole = b.sub(b.shl(b.sub(self._symbol, _lanes(REACH)), low), b.lshr(b.shl(one, low), one))
        return b.sitofp(b.add(whole, rest), _LANES_F32)

    def _next_words(self, takes: Any) -> Any:
        """Return the next words of the stream, one for each lane that takes one, and 0 for the others."""
        e, count, place = self._e, takes.type.count, self._e.b.load(self._place)
        e.b.store(e.b.add(place, e.count(takes)), self._place)
        kind = ir.VectorType(_I32, count)
        words = e.b.zext(e.load(e.at(self._words, place), ir.VectorType(_I16, count)), kind)
        return e.call(f"llvm.x86.avx512.mask.expand.v{count}i32", kind, words, e.splat(0, kind), takes)


class _Writer(_Stream):
    """Emits the encoding of one stream, a number of each lane at a time. Low bits and escapes are not for it."""

    def __init__(self, *stream: Any, frequencies: Any, starts: Any, numbers: Any, finer: Any) -> None:
        """stream: see `_Stream`; pointers to its table, and to the numbers, which are multiplied by `finer`."""
        super().__init__(*stream)
        self._frequencies, self._starts, self._numbers = frequencies, starts, numbers
        self._finer = self._e.splat(finer, _LANES_F32)

    def look(self, group: Any) -> Any:
        """Round a group's numbers and look their symbols up. Returns whether `take` may go on: none is escaped."""
        e, b = self._e, self._e.b
        x = b.fmul(e.load(e.at(self._numbers, e.times(group, LANES)), _LANES_F32), self._finer)
        for predicate, bound in (("<", -_ESCAPED), (">", _ESCAPED - 1)):
            bounds = e.splat(float(bound), _LANES_F32)
            x = b.select(b.fcmp_ordered(predicate, x, bounds), bounds, x)
        x = e.call(f"llvm.rint.v{LANES}f32", _LANES_F32, x)
        symbol = b.add(b.fptosi(x, _LANES_I32), _lanes(REACH))
        is_far = b.icmp_unsigned(">=", symbol, _lanes(ESCAPE))
        self._symbol = b.select(is_far, _lanes(ESCAPE), symbol)
        self._frequency = e.gather(_LANES_I32, self._frequencies, self._symbol)
        return e.none(b.or_(is_far, b.icmp_unsigned("==", self._frequency, _lanes(0))))

    def take(self) -> None:
        """Code a group's numbers, the last lane's first."""
        e, b = self._e, self._e.b
        x, place = b.load(self._state), b.load(self._place)
        is_long = b.icmp_unsigned(">=", x, b.shl(self._frequency, _lanes(31 - PROBABILITY_BITS)))
        backwards = range(LANES)[::-1]
        words, leaves = (e.shuffle(v, v, backwards) for v in (b.and_(x, _lanes(0xFFFF)), is_long))
        words = e.call(f"llvm.x86.avx512.mask.compress.v{LANES}i32", _LANES_I32, words, words, leaves)
        e.store(words, e.at(self._words, place))  # those that are not the stream's are written over
        b.store(b.add(place, e.count(leaves)), self._place)
        x = b.select(is_long, b.lshr(x, _lanes(16)), x)
        # Both are less than 2^31, and as doubles their quotient never rounds up to a whole number.
        quotient = b.fdiv(b.sitofp(x, _LANES_F64), b.sitofp(self._frequency, _LANES_F64))
        quotient = b.fptosi(quotient, _LANES_I32)
        rest = b.sub(x, b.mul(quotient, self._frequency))
        start = e.gather(_LANES_I32, self._starts, self._symbol)
        b.store(b.add(b.add(b.shl(quotient, _lanes(PROBABILITY_BITS)), rest), start), self._state)


def _lanes(value: int) -> Any:
    return ir.Constant(_LANES_I32, [value] * LANES)


def _run_streams(e: _Emit, streams: Sequence[_Reader | _Writer], group: Any, step: int) -> Any:
    """Go through the groups, up or down, as long as all streams may go on. Returns the group at which they stopped,
    which they have left as it was, or the one behind the last."""
    b, at = e.b, e.variable(group)
    ahead, look, take, end = (b.append_basic_block(name) for name in ("ahead", "look", "take", "end"))
    b.branch(ahead)
    b.position_at_end(ahead)
    b.cbranch(b.icmp_unsigned("<", b.load(at), _I64(GROUPS)), look, end)  # unsigned: not below 0 either
    b.position_at_end(look)
    b.cbranch(functools.reduce(b.and_, [stream.look(b.load(at)) for stream in streams]), take, end)
    b.position_at_end(take)
    for stream in streams:
        stream.take()
    b.store(b.add(b.load(at), _I64(step)), at)
    b.branch(ahead)
    b.position_at_end(end)
    for stream in streams:
        stream.keep()
    return b.load(at)


def _decoder(name: str, has_low: bool) -> Any:
    """Make what decodes a component with vectors, with or without low bits."""

    def emit(
        e: _Emit,
        segments: ir.Value,
        segment_words: ir.Value,
        row: ir.Value,
        last: ir.Value,
        entries: ir.Value,
        values: ir.Value,
        states: ir.Value,
        places: ir.Value,
        components: ir.Value,
        side_size: ir.Value,
        chosen: ir.Value,
        component: ir.Value,
        group: ir.Value,
    ) -> ir.Value:
        readers = []
        for number in range(TOGETHER):
            side, table, low = (e.b.load(e.at(chosen, 3 * number + i)) for i in range(3))
            readers.append(
                _Reader(
                    e,
                    e.at(segments, e.b.mul(e.b.add(row, side), segment_words)),
                    e.at(states, e.times(side, LANES)),
                    e.at(places, side),
                    entries=e.at(entries, e.times(table, 1 << PROBABILITY_BITS)),
                    values=e.at(values, e.times(table, SYMBOLS)),
                    out=e.at(components, e.b.mul(side, side_size), e.times(component, ROWS)),
                    low=low if has_low else None,
                    last=last,
                )
            )
        return _run_streams(e, readers, group, 1)

    emit.__name__ = name
    return _vectors(types.int64)(emit)


_decode_plain, _decode_with_low = _decoder("_decode_plain", False), _decoder("_decode_with_low", True)


@_vectors(types.int64)
def _encode_plain(
    e: _Emit,
    words: ir.Value,
    stream_words: ir.Value,
    frequencies: ir.Value,
    starts: ir.Value,
    states: ir.Value,
    places: ir.Value,
    components: ir.Value,
    side_size: ir.Value,
    chosen: ir.Value,
    finer: ir.Value,
    component: ir.Value,
    group: ir.Value,
) -> ir.Value:
    writers = []
    for number in range(TOGETHER):
        side, table = (e.b.load(e.at(chosen, 3 * number + i)) for i in range(2))
        writers.append(
            _Writer(
                e,
                e.at(words, e.b.mul(side, stream_words)),
                e.at(states, e.times(side, LANES)),
                e.at(places, side),
                frequencies=e.at(frequencies, e.times(table, SYMBOLS)),
                starts=e.at(starts, e.times(table, SYMBOLS)),
                numbers=e.at(components, e.b.mul(side, side_size), e.times(component, ROWS)),
                finer=e.b.load(e.at(finer, side)),
            )
        )
    return _run_streams(e, writers, group, -1)


def _has_vectors() -> bool:
    """Whether numba compiles for a processor with what `_Reader` and `_Writer` need; if it did not, LLVM would end the
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
    # A shift: a division could raise, and what can raise is not inlined, which would make decoding half as fast.
    size, sides = segments.strides[0] >> 1, scratch.components
    entries, values, states, places = tables.entries, tables.values, scratch.states, scratch.places
    side_size, chosen = sides.shape[1] * ROWS, scratch.chosen
    stopped: int
    if has_low:
        stopped = _decode_with_low(
            segments, size, row, last, entries, values, states, places, sides, side_size, chosen, component, group
        )
    else:
        stopped = _decode_plain(
            segments, size, row, last, entries, values, states, places, sides, side_size, chosen, component, group
        )
    return stopped


@compiled()
def _encode_groups(tables: Tables, scratch: Scratch, component: int, group: int) -> int:
    """Encode groups of a component for the chosen sides, none of which stores low bits: what `_encode_group` does,
    eight lanes and TOGETHER sides at once. Returns the group at which it stopped, which it has left as it was: one in
    which a number is escaped, or -1."""
    words, sides, chosen, finer = scratch.words, scratch.components, scratch.chosen, scratch.finer
    frequencies, starts, states, places = tables.frequencies, tables.starts, scratch.states, scratch.places
    size, side_size = words.shape[1], sides.shape[1] * ROWS
    stopped: int = _encode_plain(
        words, size, frequencies, starts, states, places, sides, side_size, chosen, finer, component, group
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
    blocks, parts = len(segments), len(rooms.components)
    for part in prange(parts):
        first, stop = blocks * part // parts, blocks * (part + 1) // parts
        room = Scratch(
            rooms.number[part],
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
            scratch.number[0] = layer.k_mean[j] + scale * scratch.product[r, j]
            _to_bits(scratch.number, shift, raw[r * n + j : r * n + j + 1])


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
                scratch.number[0] = layer.v_mean[i] + scales[r] * components[n + i, r]
                _to_bits(scratch.number, shift, raw[at : at + 1])


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
            _to_floats(raw[place : place + 1], shift, scratch.number)
            out[at + i * ROWS + r] = scratch.number[0] - means[i]


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
