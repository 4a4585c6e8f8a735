"""Transform coding of a layer's blocks, compiled by numba: rows to components and whole numbers, those to a stream of
constant size by an entropy coder (rANS, Duda 2013: https://arxiv.org/abs/1311.2540), and back.

A segment, as uint16 words in little-endian order:

    word 0           how many eighths of an octave the steps are coarser than calibrated, plus FINEST
    words 1 .. 16    the coder's LANES final states, low word first
    then             an exponent for each row and head of V, a byte each: V is scaled by 2^(exponent / 4)
    then             the coder's words, in the order in which decoding reads them, and zeros

Component by component, 32 rows at a time; row r belongs to lane r mod LANES, so that eight chains of dependent
instructions overlap. Import this through `kernels.codecs.transform`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
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
FINEST, COARSEST = 8, 24
"""How much finer and coarser than calibrated a block's steps may be, in eighths of an octave. A block that needs even
coarser ones is unlike anything calibrated, and is not coded."""
HEAD_WORDS = 1 + 2 * LANES
_LEAST_STATE = 1 << 15
_MASK = (1 << PROBABILITY_BITS) - 1
_ESCAPED = 1 << (ESCAPE_BITS - 1)


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
    components: Fp32  # [n + m, ROWS], in steps
    product: Fp32  # [ROWS, width], or its like
    deviations: Int64  # [n + m], in quarter octaves
    words: Words  # the stream while it is made, from its end; 2 * ROWS longer than it may be
    states: Words  # [LANES]


TILE = 8, 32  # rows and columns of a product that are summed in registers
_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VEC = ir.VectorType(_F32, 16)


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
    for block in range(len(segments)):
        words = segments[block]
        coarser = min(int(words[0]) & 0xFF, FINEST + COARSEST) - FINEST
        states = scratch.states
        for lane in range(LANES):
            states[lane] = np.uint32(words[1 + 2 * lane]) | np.uint32(words[2 + 2 * lane]) << np.uint32(16)
        at = HEAD_WORDS + (ROWS * layer.heads + 1) // 2
        live = _decode_numbers(words, at, size_words - 1, n, coarser, tables, layer, scratch)
        _components_to_k(layer, scratch, live, n, np.float32(2.0 ** (_quarters(coarser, 0) / 4)))
        _numbers_to_v(words, layer, scratch, n, m, _quarters(coarser, 1))
        _write(scratch.rows, n, m, shift, raw[block])


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
        )
        decode(segments[first:stop], size_words, tables, layer, shift, room, raw[first:stop])


@compiled()
def _decode_numbers(
    words: Bits, at: int, last: int, n: int, coarser: int, tables: Tables, layer: Layer, scratch: Scratch
) -> int:
    """Fill scratch.components. Returns how many of K's are not all zero."""
    states, classes = scratch.states, layer.classes
    live = n
    for c in range(len(classes)):
        table, low = class_of(classes[c], _quarters(coarser, c >= n))
        out = scratch.components[c]
        if table < 0:
            out[:] = 0
            if c < live:
                live = c
            continue
        entries, values = tables.entries[table], tables.values[table]
        for r in range(ROWS):
            lane = r & (LANES - 1)
            x = states[lane]
            entry = entries[x & np.uint32(_MASK)]
            symbol = entry & np.uint32(0xFF)
            x = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(PROBABILITY_BITS)) + (
                entry >> np.uint32(20)
            )
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
            out[r] = number
    return live


@compiled()
def _components_to_k(layer: Layer, scratch: Scratch, live: int, n: int, scale: float) -> None:
    """live: the components from here on are zero in every row."""
    rows, columns = TILE
    width = layer.back.shape[1]
    components, back, out = scratch.components.reshape(-1), layer.back.reshape(-1), scratch.product.reshape(-1)
    for r in range(0, ROWS, rows):
        for j in range(0, width, columns):
            _multiply_tile(components, r, ROWS, back, j, width, live, out, r * width + j, width)
    for r in range(ROWS):
        for j in range(n):
            scratch.rows[r, j] = layer.k_mean[j] + scale * scratch.product[r, j]


@compiled()
def _numbers_to_v(words: Bits, layer: Layer, scratch: Scratch, n: int, m: int, quarters: int) -> None:
    width = m // layer.heads
    exponents = words[HEAD_WORDS:].view(np.int8)
    for r in range(ROWS):
        for head in range(layer.heads):
            quarter = np.float32(exponents[r * layer.heads + head] + quarters)
            scale = np.float32(layer.v_step * 2.0 ** (quarter / 4))
            for i in range(head * width, (head + 1) * width):
                scratch.rows[r, n + i] = layer.v_mean[i] + scale * scratch.components[n + i, r]


@compiled()
def _write(rows: Fp32, n: int, m: int, shift: int, raw: Bits) -> None:
    for r in range(ROWS):
        _to_bits(rows[r, :n], shift, raw[r * n : (r + 1) * n])
        _to_bits(rows[r, n:], shift, raw[ROWS * n + r * m : ROWS * n + (r + 1) * m])


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
    for block in range(len(raw)):
        words = segments[block]
        words[:] = 0
        for r in range(ROWS):
            _to_floats(raw[block, r * n : (r + 1) * n], shift, scratch.rows[r, :n])
            _to_floats(raw[block, ROWS * n + r * m : ROWS * n + (r + 1) * m], shift, scratch.rows[r, n:])
        encoded[block] = False
        if not (_k_to_components(layer, scratch, n) and _v_to_components(words, layer, scratch, n, m)):
            continue
        room = size_words - begin
        coarser = _finest(n, tables, layer, scratch, room * 16)
        while coarser <= COARSEST:
            used = _encode_numbers(coarser, room, n, tables, layer, scratch)
            if used >= 0:
                break
            coarser += 1
        else:
            continue
        words[0] = coarser + FINEST
        for lane in range(LANES):
            words[1 + 2 * lane] = scratch.states[lane] & np.uint32(0xFFFF)
            words[2 + 2 * lane] = scratch.states[lane] >> np.uint32(16)
        for i in range(used):
            words[begin + i] = scratch.words[used - 1 - i]
        encoded[block] = True


@compiled()
def _k_to_components(layer: Layer, scratch: Scratch, n: int) -> bool:
    """Return whether all are finite."""
    rows, _ = TILE
    width = layer.into.shape[1]
    centred, into, out = scratch.product.reshape(-1), layer.into.reshape(-1), scratch.components.reshape(-1)
    for r in range(ROWS):
        for i in range(n):
            centred[i * ROWS + r] = scratch.rows[r, i] - layer.k_mean[i]
    for j in range(0, width, rows):  # rows of the result are components, its columns a block's rows
        _multiply_tile(into, j, width, centred, 0, ROWS, n, out, j * ROWS, ROWS)
    total = np.float32(0)
    for i in range(n * ROWS):
        total += abs(out[i])
    return bool(np.isfinite(total))


@compiled()
def _v_to_components(words: Bits, layer: Layer, scratch: Scratch, n: int, m: int) -> bool:
    """Also write the scales' exponents. Returns whether all are finite."""
    width = m // layer.heads
    exponents = words[HEAD_WORDS:].view(np.int8)
    for r in range(ROWS):
        for head in range(layer.heads):
            energy = np.float32(0)
            for i in range(head * width, (head + 1) * width):
                x = scratch.rows[r, n + i] - layer.v_mean[i]
                energy += x * x
            if not np.isfinite(energy):
                return False
            quarter = round(2 * np.log2(max(energy / width, np.float32(1e-18))))
            quarter = min(max(quarter, -127), 127)
            exponents[r * layer.heads + head] = quarter
            scale = np.float32(1 / (layer.v_step * 2.0 ** (quarter / 4)))
            for i in range(head * width, (head + 1) * width):
                scratch.components[n + i, r] = (scratch.rows[r, n + i] - layer.v_mean[i]) * scale
    return True


@compiled()
def _finest(n: int, tables: Tables, layer: Layer, scratch: Scratch, bits: int) -> int:
    """Predict the finest steps whose code fits in so many bits, from how much each component deviates in this block."""
    components, classes, deviations = scratch.components, layer.classes, scratch.deviations
    for c in range(len(classes)):
        energy = np.float32(0)
        for r in range(ROWS):
            energy += components[c, r] * components[c, r]
        deviations[c] = round(2 * math.log2(max(energy / ROWS, np.float32(1e-12))))
    for coarser in range(-FINEST, COARSEST):
        predicted = np.float32(0)
        for c in range(len(classes)):
            quarters = _quarters(coarser, c >= n)
            table, low = class_of(classes[c], quarters)
            if table >= 0:
                own = deviations[c] - quarters - 4 * low
                own = min(max(own, LEAST_DEVIATION), LARGEST_DEVIATION) - LEAST_DEVIATION
                predicted += np.float32(low) + tables.costs[table, own]
        if predicted * ROWS <= bits:
            return coarser
    return COARSEST


@compiled()
def _encode_numbers(coarser: int, room: int, n: int, tables: Tables, layer: Layer, scratch: Scratch) -> int:
    """Code from the last number to the first. Returns the count of words in scratch.words, or -1: they do not fit."""
    states, classes, out = scratch.states, layer.classes, scratch.words
    states[:] = _LEAST_STATE
    used = 0
    for c in range(len(classes) - 1, -1, -1):
        quarters = _quarters(coarser, c >= n)
        table, low = class_of(classes[c], quarters)
        if table < 0:
            continue
        if used > room:
            return -1
        frequencies, starts = tables.frequencies[table], tables.starts[table]
        half = 1 << low >> 1
        finer = np.float32(2.0 ** (-quarters / 4))
        for r in range(ROWS - 1, -1, -1):
            lane = r & (LANES - 1)
            x = states[lane]
            number = int(np.rint(scratch.components[c, r] * finer))
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
    return used if used <= room else -1
