"""Multiplies rows by one block of a weight's outputs: in bf16 as oneDNN lays it out, or packed to 4 or 8 bits.

All are compiled by numba. A row's sums are the same, bit for bit, however many rows there are: with dot products of
bf16 pairs where the processor has them (AVX512_BF16), else in fp32 on vectors of any length.

Packed weights are read as they are stored. A row is divided into groups of 32 inputs, or of 16. Each group has, for
every output, a scale and perhaps a low (the number that code 0 stands for) in fp16. A number is `scale * code + low`.
Codes of 4 bits are 0 to 15; without lows, 8 is subtracted from them, or they are places in the table of FP4 (e2m1).
Codes of 8 bits are -128 to 127. Sums of products with codes are scaled once a group, a fifth of the work of unpacking
numbers.

Codes lie in blocks of 32 outputs and all inputs, in the order in which they are read. Within 32 inputs a block of 8-bit
codes has 16 pairs of inputs, one after the other, each with the 32 outputs; the codes of a pair are adjacent. A block
of 4-bit codes has four quads of 8 inputs. A quad has two vectors, each of 16 outputs, and a vector has a 32-bit word
for each output, which holds its 8 codes. Half j (0 or 1) of the word holds four codes of 4 bits, lowest first: code n
belongs to input 2 * n + j of the quad. Scales and lows are fp16 [blocks, groups, 32].

Arguments are addresses, so nothing checks them; `reprise.kernels.cpu.layers` and `reprise.kernels.cpu.decode` own the
arithmetic.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.ccallback import CFunc

from reprise.kernels.cpu.emit import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    PAIRS,
    VEC,
    VEC_F16,
    VEC_I8,
    VEC_I16,
    VEC_I32,
    Emit,
    compiled,
    emitted,
    fp32_at,
    int64_at,
    keep_compiled,
)
from reprise.kernels.packed import TABLES, ZERO
from reprise.kernels.views import Constant

GROUP = 32  # inputs that share a scale
BLOCK = 32  # outputs computed together
FEW = 16  # rows for which codes are unpacked in registers; for more, once into memory
_QUAD_BYTES = {4: 128, 8: 256, 16: 512}  # bytes of eight inputs of a block, by bits
# Bytes prefetched, of codes and of bf16 numbers: the processor's own prefetch stops at the end of a page.
_AHEAD, _AHEAD_WORDS = 2048, 4096


PLAIN, WITH_LOWS, E2M1 = range(3)
"""Say what codes stand for: numbers, to which nothing is added; numbers, with a low in each group; places in the table
of FP4."""


def _bf16_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


def _code_table(kind: int) -> ir.Constant:
    """Return the 16 bf16 numbers that 4-bit codes stand for, twice, because the look-up instruction takes five bits.
    kind: PLAIN, where code 8 stands for 0, WITH_LOWS or E2M1."""
    numbers = TABLES["e2m1"] if kind == E2M1 else [code - (ZERO if kind == PLAIN else 0) for code in range(16)]
    return ir.Constant(PAIRS, [_bf16_bits(number) for number in numbers] * 2)


def _unpacked(e: Emit, bits: int, kind: int, pointer: Any) -> list[Any]:
    """Load 64 bytes of codes and return them as operands of dot products, 32 bf16 numbers each: for 4 bits four pairs
    of inputs for 16 outputs, for 8 bits one pair for 32."""
    if bits == 4:
        words = e.load(pointer, PAIRS)
        table = _code_table(kind)
        shifted = [words, *(e.b.lshr(words, ir.Constant(PAIRS, [n] * 2 * LANES)) for n in (4, 8, 12))]
        return [e.call("llvm.x86.avx512.permvar.hi.512", PAIRS, table, index) for index in shifted]
    found = []
    for half in range(2):
        wide = [e.b.sitofp(e.load(e.at(pointer, half * 32 + part * 16), VEC_I8), VEC) for part in range(2)]
        found.append(e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, wide[1], wide[0]))
    return found


@emitted
def _by_dots(
    e: Emit,
    bits: int,
    kind: int,
    quads: int,
    rows: int,
    x: ir.Value,
    x_row: ir.Value,
    sums: ir.Value,
    sums_row: ir.Value,
    codes: ir.Value,
    scales: ir.Value,
    lows: ir.Value,
    groups: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute the 32 outputs of one block for `rows` rows by dot products of bf16 pairs.

    bits: of a code, or 16 for codes that are bf16 numbers already. kind: what codes stand for; WITH_LOWS: a group has
    lows, numbers to be added to all of its products. quads: sets of eight inputs in a group. x: the rows, bf16. sums:
    the sum of each group of a row's inputs, fp32, by which its low is multiplied. codes, scales, lows: of the block,
    for `groups` groups. out: fp32. x_row, sums_row, out_row: bytes from row to row.
    """
    totals = [[e.vector() for _ in range(2)] for _ in range(rows)]
    size = _QUAD_BYTES[bits] * quads
    with cgutils.for_range(e.b, groups) as group:
        parts = [[e.vector() for _ in range(2)] for _ in range(rows)]
        base, there = e.at(codes, e.mul(group.index, size)), e.at(x, e.mul(group.index, quads * 16))
        with cgutils.for_range(e.b, I64(quads)) as quad:
            here, ours = e.at(base, e.mul(quad.index, size // quads)), e.at(there, e.mul(quad.index, 16))
            if bits == 4:
                operands = [_unpacked(e, 4, kind, e.at(here, lane * 64)) for lane in range(2)]
                weights = [[operands[lane][pair] for lane in range(2)] for pair in range(4)]
            elif bits == 8:
                weights = [_unpacked(e, 8, kind, e.at(here, pair * 64)) for pair in range(4)]
            else:
                weights = [
                    [e.load(e.at(here, pair * 128 + lane * 64), PAIRS) for lane in range(2)] for pair in range(4)
                ]
            if bits != 16:
                for line in range(0, size // quads, 64):
                    e.prefetch(e.at(here, _AHEAD + line))
            for pair in range(4):
                for row in range(rows):
                    both = e.splat(e.load(e.at(ours, e.mul(x_row, row), pair * 4), I32))
                    for lane in range(2):
                        part = parts[row][lane]
                        words = e.b.bitcast(weights[pair][lane], VEC_I32)
                        e.b.store(e.dot(e.b.load(part), both, words), part)
        _scale(e, kind == WITH_LOWS, rows, sums, sums_row, scales, lows, group.index, parts, totals)
    for row in range(rows):
        for lane in range(2):
            e.store(e.b.load(totals[row][lane]), e.at(out, e.mul(out_row, row), lane * 64))


def _scale(
    e: Emit,
    has_lows: bool,
    rows: int,
    sums: Any,
    sums_row: Any,
    scales: Any,
    lows: Any,
    group: Any,
    parts: list[list[Any]],
    totals: list[list[Any]],
    unit: float = 1.0,
) -> None:
    """Add one group to the totals: totals += unit * scale * parts, and if there are lows, low * (sum of the group's
    inputs). parts, totals: variables [rows][2], vectors of 16 outputs; parts are sums of products with the codes. unit:
    a power of two."""
    for lane in range(2):
        where = e.add(e.mul(group, BLOCK * 2), lane * 32)
        scale = e.b.fpext(e.load(e.at(scales, where), VEC_F16), VEC)
        if unit != 1:
            scale = e.b.fmul(scale, e.splat(unit))
        low = e.b.fpext(e.load(e.at(lows, where), VEC_F16), VEC) if has_lows else None
        for row in range(rows):
            e.add_product(totals[row][lane], e.b.load(parts[row][lane]), scale)
            if low is not None:
                total = e.load(e.at(sums, e.mul(sums_row, row), e.mul(group, 4)), F32)
                e.add_product(totals[row][lane], e.splat(total), low)


@emitted
def _by_sums(
    e: Emit,
    bits: int,
    kind: int,
    quads: int,
    rows: int,
    x: ir.Value,
    x_row: ir.Value,
    sums: ir.Value,
    sums_row: ir.Value,
    codes: ir.Value,
    scales: ir.Value,
    lows: ir.Value,
    groups: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute the same as `_by_dots`, without dot products of pairs and with x in fp32. LLVM splits vectors where
    registers are shorter."""
    totals = [[e.vector() for _ in range(2)] for _ in range(rows)]
    size = _QUAD_BYTES[bits] * quads
    with cgutils.for_range(e.b, groups) as group:
        parts = [[e.vector() for _ in range(2)] for _ in range(rows)]
        base, there = e.at(codes, e.mul(group.index, size)), e.at(x, e.mul(group.index, quads * 32))
        steps = quads if bits == 4 else 4 * quads
        with cgutils.for_range(e.b, I64(steps)) as step:
            here, ours = (
                e.at(base, e.mul(step.index, size // steps)),
                e.at(there, e.mul(step.index, quads * 32 // steps)),
            )
            for line in range(0, size // steps, 64):
                e.prefetch(e.at(here, _AHEAD + line))
            for lane in range(2):
                numbers = _four_bits(e, e.at(here, lane * 64), kind) if bits == 4 else _pair(e, here, lane)
                for place, number in enumerate(numbers):
                    for row in range(rows):
                        value = e.load(e.at(ours, e.mul(x_row, row), place * 4), F32)
                        e.add_product(parts[row][lane], e.splat(value), number)
        unit = 0.5 if kind == E2M1 else 1.0
        _scale(e, kind == WITH_LOWS, rows, sums, sums_row, scales, lows, group.index, parts, totals, unit)
    for row in range(rows):
        for lane in range(2):
            e.store(e.b.load(totals[row][lane]), e.at(out, e.mul(out_row, row), lane * 64))


def _four_bits(e: Emit, pointer: Any, kind: int) -> list[Any]:
    """Load the 4-bit codes of four pairs of inputs for 16 outputs. kind: what they stand for. Returns 8 vectors of
    numbers in fp32, one for each input: for E2M1 twice the numbers, which are whole."""
    words = e.load(pointer, VEC_I32)
    if kind == WITH_LOWS:
        shifts = [pair * 4 + odd * 16 for pair in range(4) for odd in range(2)]
        return [e.b.sitofp(e.b.and_(e.b.lshr(words, e.words(shift)), e.words(15)), VEC) for shift in shifts]
    # Two codes of each byte, the lower one first.
    numbers = [_byte_numbers(e, e.b.lshr(words, e.words(shift)), kind) for shift in (0, 4)]
    found = []
    for pair in range(4):
        for odd in range(2):
            place = pair // 2 + 2 * odd
            first = e.b.shl(numbers[pair % 2], e.words(24 - 8 * place))
            found.append(e.b.sitofp(e.b.ashr(first, e.words(24)), VEC))
    return found


def _byte_numbers(e: Emit, words: Any, kind: int) -> Any:
    """Look up what the lower four bits of each byte stand for, PLAIN or E2M1, by an instruction of AVX2. Returns bytes,
    as words."""
    numbers = [int(2 * number) for number in TABLES["e2m1"]] if kind == E2M1 else [code - ZERO for code in range(16)]
    codes = e.b.bitcast(e.b.and_(words, e.words(0x0F0F0F0F)), ir.VectorType(I8, 4 * LANES))
    half = 2 * LANES
    table = ir.Constant(ir.VectorType(I8, half), numbers * 2)
    found = [
        e.call("llvm.x86.avx2.pshuf.b", table.type, table, e.shuffled(codes, codes, [*range(first, first + half)]))
        for first in (0, half)
    ]
    return e.b.bitcast(e.shuffled(found[0], found[1], [*range(4 * LANES)]), VEC_I32)


def _pair(e: Emit, pointer: Any, lane: int) -> list[Any]:
    """Load the 8-bit codes of a pair of inputs for 16 outputs. lane: which half of the block's 32 outputs, 0 or 1.
    Returns two vectors of numbers in fp32, one for each input."""
    words = e.b.sext(e.load(e.at(pointer, lane * 32), VEC_I16), VEC_I32)
    low = e.b.ashr(e.b.shl(words, e.words(24)), e.words(24))
    return [e.b.sitofp(low, VEC), e.b.sitofp(e.b.ashr(words, e.words(8)), VEC)]


@emitted
def _unpack(e: Emit, bits: int, kind: int, codes: ir.Value, quads: ir.Value, out: ir.Value) -> None:
    """Write a block's codes to `out` as bf16 numbers [quads, 4 pairs of inputs, 32 outputs, 2]. quads: sets of eight
    inputs in the block. bits: of a code. kind: what codes stand for."""
    size = _QUAD_BYTES[bits]
    with cgutils.for_range(e.b, quads) as quad:
        here, there = e.at(codes, e.mul(quad.index, size)), e.at(out, e.mul(quad.index, _QUAD_BYTES[16]))
        for first in range(2 if bits == 4 else 4):
            for place, operand in enumerate(_unpacked(e, bits, kind, e.at(here, first * 64))):
                pair, lane = (place, first) if bits == 4 else (first, place)
                e.store(operand, e.at(there, pair * 128 + lane * 64))
        for line in range(0, size, 64):
            e.prefetch(e.at(here, _AHEAD + line))


@emitted
def _by_words(
    e: Emit,
    dots: int,
    columns: int,
    rows: int,
    x: ir.Value,
    x_row: ir.Value,
    w: ir.Value,
    w_pair: ir.Value,
    pairs: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
) -> None:
    """Compute outputs for `rows` rows with a weight in bf16. columns: how many vectors of 16 outputs. dots: 1 if the
    processor has dot products of bf16 pairs, else 0. x: the rows, bf16 with dots, else fp32. w: a word of two bf16 (a
    pair of inputs) for each output; w_pair: bytes from one pair of inputs to the next. x_row, out_row: bytes from row
    to row."""
    sums = [[e.vector() for _ in range(columns)] for _ in range(rows)]
    with cgutils.for_range(e.b, pairs) as loop:
        here, ours = e.at(w, e.b.mul(w_pair, loop.index)), e.at(x, e.mul(loop.index, 4 if dots else 8))
        weights = [e.load(e.at(here, column * 64), VEC_I32) for column in range(columns)]
        for column in range(columns):
            e.prefetch(e.at(here, _AHEAD_WORDS + column * 64))
        parts = [] if dots else [e.halves(words) for words in weights]
        for row in range(rows):
            there = e.at(ours, e.mul(x_row, row))
            if dots:
                both = e.splat(e.load(there, I32))
                for column in range(columns):
                    e.b.store(e.dot(e.b.load(sums[row][column]), both, weights[column]), sums[row][column])
                continue
            values = [e.splat(e.load(e.at(there, place * 4), F32)) for place in range(2)]
            for column in range(columns):
                for value, part in zip(values, parts[column], strict=True):
                    e.add_product(sums[row][column], value, part)
    for row in range(rows):
        for column in range(columns):
            e.store(e.b.load(sums[row][column]), e.at(out, e.mul(out_row, row), column * 64))


# --- compiled ---------------------------------------------------------------------------------------------------------


@compiled()
def _few(
    bits: Constant,
    dots: Constant,
    kind: Constant,
    quads: Constant,
    rows: int,
    x: int,
    x_row: int,
    sums: int,
    sums_row: int,
    codes: int,
    scales: int,
    lows: int,
    groups: int,
    out: int,
    out_row: int,
) -> None:
    """Compute one block of a packed weight's outputs for a few rows. The block is unpacked anew for every few of them,
    with dot products for eight at most. x: address of the rows, bf16 with dot products, else fp32. For the other
    parameters see `_by_dots`. A Constant is a tuple whose length is meant."""
    row = 0
    while row < rows:
        at, total, to = x + row * x_row, sums + row * sums_row, out + row * out_row
        if len(dots):
            if rows - row >= 8:
                _by_dots(
                    bits,
                    kind,
                    quads,
                    (0,) * 8,
                    at,
                    x_row,
                    total,
                    sums_row,
                    codes,
                    scales,
                    lows,
                    groups,
                    to,
                    out_row,
                )
                row += 8
            elif rows - row >= 4:
                _by_dots(
                    bits,
                    kind,
                    quads,
                    (0,) * 4,
                    at,
                    x_row,
                    total,
                    sums_row,
                    codes,
                    scales,
                    lows,
                    groups,
                    to,
                    out_row,
                )
                row += 4
            elif rows - row >= 2:
                _by_dots(
                    bits,
                    kind,
                    quads,
                    (0,) * 2,
                    at,
                    x_row,
                    total,
                    sums_row,
                    codes,
                    scales,
                    lows,
                    groups,
                    to,
                    out_row,
                )
                row += 2
            else:
                _by_dots(bits, kind, quads, (0,), at, x_row, total, sums_row, codes, scales, lows, groups, to, out_row)
                row += 1
        elif rows - row >= 4:
            _by_sums(bits, kind, quads, (0,) * 4, at, x_row, total, sums_row, codes, scales, lows, groups, to, out_row)
            row += 4
        else:
            _by_sums(bits, kind, quads, (0,), at, x_row, total, sums_row, codes, scales, lows, groups, to, out_row)
            row += 1


@compiled()
def _many(
    bits: Constant,
    kind: Constant,
    quads: Constant,
    rows: int,
    x: int,
    x_row: int,
    sums: int,
    sums_row: int,
    codes: int,
    scales: int,
    lows: int,
    groups: int,
    out: int,
    out_row: int,
    scratch: int,
) -> None:
    """Do the same as `_few`, with dot products, for many rows: the block is unpacked only once, into `scratch`."""
    _unpack(bits, kind, codes, groups * len(quads), scratch)
    row = 0
    while row < rows:
        at, total, to = x + row * x_row, sums + row * sums_row, out + row * out_row
        if rows - row >= 12:
            _by_dots(
                (0,) * 16,
                kind,
                quads,
                (0,) * 12,
                at,
                x_row,
                total,
                sums_row,
                scratch,
                scales,
                lows,
                groups,
                to,
                out_row,
            )
            row += 12
        elif rows - row >= 4:
            _by_dots(
                (0,) * 16,
                kind,
                quads,
                (0,) * 4,
                at,
                x_row,
                total,
                sums_row,
                scratch,
                scales,
                lows,
                groups,
                to,
                out_row,
            )
            row += 4
        else:
            _by_dots(
                (0,) * 16, kind, quads, (0,), at, x_row, total, sums_row, scratch, scales, lows, groups, to, out_row
            )
            row += 1


@compiled()
def _words(
    dots: Constant,
    columns: Constant,
    rows: int,
    x: int,
    x_row: int,
    w: int,
    pairs: int,
    out: int,
    out_row: int,
) -> None:
    """Compute one block of `columns` vectors of outputs, 1 to 4, of a weight in bf16. Sums of four vectors fill the
    registers for up to four rows; for more rows, halves of the block are computed one after the other."""
    row, w_pair = 0, len(columns) * 64
    while row < rows:
        at, to = x + row * x_row, out + row * out_row
        if rows - row >= 8:
            if len(columns) == 4:
                _by_words(dots, (0, 0), (0,) * 8, at, x_row, w, w_pair, pairs, to, out_row)
                _by_words(dots, (0, 0), (0,) * 8, at, x_row, w + 128, w_pair, pairs, to + 128, out_row)
            else:
                _by_words(dots, columns, (0,) * 8, at, x_row, w, w_pair, pairs, to, out_row)
            row += 8
        elif rows - row >= 4:
            _by_words(dots, columns, (0,) * 4, at, x_row, w, w_pair, pairs, to, out_row)
            row += 4
        elif rows - row >= 2:
            _by_words(dots, columns, (0,) * 2, at, x_row, w, w_pair, pairs, to, out_row)
            row += 2
        else:
            _by_words(dots, columns, (0,), at, x_row, w, w_pair, pairs, to, out_row)
            row += 1


# --- kernels by address -----------------------------------------------------------------------------------------------

KERNEL, CODES, SCALES, LOWS, BIAS, INPUTS, OUTPUTS, SIZE, FIRST, BITS, GROUP_SIZE, KIND = range(12)
PRODUCT_FIELDS = 12
"""Fields of a product in a table, int64: the address of its kernel (0: there is no product), of codes, scales,
lows and bias (fp32; 0: none), inputs (padded to GROUP), outputs, outputs of a block, the column of the first output
among those of other products of the same inputs, and of packed weights the bits, the inputs of a group, and what codes
stand for: PLAIN, WITH_LOWS or E2M1."""


class Place(NamedTuple):
    """The memory that a kernel for one block of a product reads and writes: addresses, and bytes from row to row
    (`*_row`). rows: how many rows. x: rows of inputs, in bf16 if dot products are used, otherwise in fp32. sums: sum of
    each group of a row's inputs, fp32, for weights with lows. out: outputs, fp32."""

    rows: int
    x: int
    x_row: int
    sums: int
    sums_row: int
    out: int
    out_row: int


_SIGNATURE = types.void(*[types.int64] * 10)  # product, block, a place, scratch


@emitted
def call_kernel(
    e: Emit,
    kernel: ir.Value,
    product: ir.Value,
    block: ir.Value,
    rows: ir.Value,
    x: ir.Value,
    x_row: ir.Value,
    sums: ir.Value,
    sums_row: ir.Value,
    out: ir.Value,
    out_row: ir.Value,
    scratch: ir.Value,
) -> None:
    """Call a kernel by its address, so that its code is compiled once and not into each of its callers."""
    function = e.b.inttoptr(kernel, ir.FunctionType(ir.VoidType(), [I64] * 10).as_pointer())
    e.b.call(function, [product, block, rows, x, x_row, sums, sums_row, out, out_row, scratch])


@compiled()
def _add_bias(bias: int, first: int, count: int, rows: int, out: int, out_row: int) -> None:
    if bias:
        numbers = carray(fp32_at(bias + first * 4), (count,), np.float32)
        for row in range(rows):
            sums = carray(fp32_at(out + row * out_row), (count,), np.float32)
            for i in range(count):
                sums[i] += numbers[i]


def _by_address(kernel: Callable[..., None]) -> CFunc:
    """Compile a kernel that other code calls by its address."""
    made = CFunc(kernel, (_SIGNATURE.args, _SIGNATURE.return_type), {}, {"nopython": True, "nogil": True})
    keep_compiled(made)
    made.compile()
    return made


@functools.cache
def packed_kernel(bits: int, kind: int, group: int, dots: bool) -> CFunc:
    """Return a kernel that multiplies by one block of a packed weight. bits: of a code. kind: what codes stand for.
    group: adjacent inputs that share a scale. dots: use dot products of bf16 pairs. The result must be kept as long as
    its `address` is used."""
    bits_, kind_, quads = (0,) * bits, (0,) * kind, (0,) * (group // 8)
    if dots:

        def kernel(product, block, rows, x, x_row, sums, sums_row, out, out_row, scratch):  # type: ignore[no-untyped-def]
            p = carray(int64_at(product), (PRODUCT_FIELDS,), np.int64)
            groups = p[INPUTS] // group
            codes = p[CODES] + block * p[INPUTS] * BLOCK * bits // 8
            scales, lows = p[SCALES] + block * groups * BLOCK * 2, p[LOWS] + block * groups * BLOCK * 2
            if rows > FEW:
                _many(
                    bits_, kind_, quads, rows, x, x_row, sums, sums_row, codes, scales, lows, groups, out, out_row,
                    scratch,
                )  # fmt: skip
            else:
                _few(
                    bits_, (0,), kind_, quads, rows, x, x_row, sums, sums_row, codes, scales, lows, groups, out, out_row
                )
            _add_bias(p[BIAS], block * BLOCK, min(BLOCK, p[OUTPUTS] - block * BLOCK), rows, out, out_row)

    else:

        def kernel(product, block, rows, x, x_row, sums, sums_row, out, out_row, scratch):  # type: ignore[no-untyped-def]
            p = carray(int64_at(product), (PRODUCT_FIELDS,), np.int64)
            groups = p[INPUTS] // group
            codes = p[CODES] + block * p[INPUTS] * BLOCK * bits // 8
            scales, lows = p[SCALES] + block * groups * BLOCK * 2, p[LOWS] + block * groups * BLOCK * 2
            _few(bits_, (), kind_, quads, rows, x, x_row, sums, sums_row, codes, scales, lows, groups, out, out_row)
            _add_bias(p[BIAS], block * BLOCK, min(BLOCK, p[OUTPUTS] - block * BLOCK), rows, out, out_row)

    return _by_address(kernel)


@functools.cache
def words_kernel(columns: int, dots: bool) -> CFunc:
    """Return a kernel that multiplies by one block of a weight in bf16. A block has `columns` vectors of 16 outputs.
    The result must be kept as long as its `address` is used."""
    dots_, columns_, size = (0,) * dots, (0,) * columns, columns * LANES

    def kernel(product, block, rows, x, x_row, sums, sums_row, out, out_row, scratch):  # type: ignore[no-untyped-def]
        p = carray(int64_at(product), (PRODUCT_FIELDS,), np.int64)
        pairs = p[INPUTS] // 2
        _words(dots_, columns_, rows, x, x_row, p[CODES] + block * pairs * size * 4, pairs, out, out_row)
        _add_bias(p[BIAS], block * size, min(size, p[OUTPUTS] - block * size), rows, out, out_row)

    return _by_address(kernel)
