"""Multiplies matrices in bf16 and sums every row in the same order, however many rows there are. Compiled by numba:
with AMX tiles if the processor has them, else with dot products of bf16 pairs (AVX512_BF16).

oneDNN chooses how to split a sum by the number of rows, so the last bits of a row computed alone differ from those of
the same row among others. Here a sum runs through the inputs from first to last in every case. The sum still depends on
the processor: AMX adds up 16 pairs before adding them to the sum. Sums are fp32, numbers below 1.2e-38 are 0, and a
result is rounded once, to nearest and ties to even.

Weights have oneDNN's packed layout: blocks of outputs, containing pairs of inputs. The sums of ROWS rows for COLUMNS
outputs fill the registers. Strips of rows and runs of blocks of outputs are as large as fits together into the cache
next to a core.

Import this through `reprise.kernels.cpu.available.product_kernels`.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import cgutils
from numpy.typing import NDArray

from reprise.kernels.cpu.emit import I8, I32, I64, LANES, VEC, VEC_I32, WideEmit, compiled, emitted_by, rounded, widened
from reprise.kernels.views import Bf16, Constant, Fp32, Words

ROWS = 32  # rows per group: two tiles of AMX
COLUMNS = 32  # outputs computed together
_STRIP_BYTES, _RUN_BYTES, _RUN_BLOCKS = 1 << 20, 400_000, 8
_AHEAD = 4096  # bytes of weights prefetched where there are so few rows that memory is the limit


class _Emit(WideEmit):
    """An emitter that also has AMX."""

    def tile(self, name: str, *args: Any) -> None:
        """Emit an AMX instruction; integer arguments name tiles."""
        self.call(f"llvm.x86.{name}", ir.VoidType(), *(I8(x) if isinstance(x, int) else x for x in args))

    def store_rounded(self, low: Any, high: Any, pointer: Any) -> None:
        """Round 32 numbers to bf16 and store them."""
        self.store(self.narrowed(low, high), pointer)


_emitted = emitted_by(_Emit)


@_emitted
def _configure(e: _Emit, shape: ir.Value) -> None:
    e.tile("ldtilecfg", e.at(shape))


@_emitted
def _release(e: _Emit) -> None:
    e.tile("tilerelease")


@_emitted
def _by_tiles(
    e: _Emit,
    x: ir.Value,
    x_at: ir.Value,
    tiles: int,
    w: ir.Value,
    w_at: ir.Value,
    w_pair: ir.Value,
    blocks: ir.Value,
    columns: int,
    ahead: int,
    out: ir.Value,
) -> None:
    """Compute out[r, n] = sum over k of x[r, k] * w[k // 2, n, k % 2] with AMX, for `tiles` * 16 rows, `columns` * 16
    outputs and `blocks` * 32 inputs. x: in the layout of `_packed`; x_at, w_at: bytes to the first; w_pair: bytes from
    a pair of weights to the next; out: fp32 rows of COLUMNS. ahead: 1 to prefetch weights, else 0. Tiles 0 to 3 are
    sums, 4 and 5 rows, 6 and 7 weights."""
    for tile in range(tiles * columns):
        e.tile("tilezero", tile)
    with cgutils.for_range(e.b, blocks) as loop:
        rows, weights = (
            e.at(x, x_at, e.mul(loop.index, ROWS * 64)),
            e.at(w, w_at, e.b.mul(loop.index, e.mul(w_pair, 16))),
        )
        for column in range(columns):
            e.tile("tileloadd64", 6 + column, e.at(weights, column * 64), w_pair)
        if ahead:
            for pair in range(16):
                line = e.at(weights, e.b.mul(w_pair, I64(pair)), _AHEAD)
                for column in range(columns):
                    e.prefetch(e.at(line, column * 64))
        for tile in range(tiles):
            e.tile("tileloadd64", 4 + tile, e.at(rows, 16 * 64 * tile), I64(64))
            for column in range(columns):
                e.tile("tdpbf16ps", tile * columns + column, 4 + tile, 6 + column)
    for tile in range(tiles):
        for column in range(columns):
            there = e.at(out, (tile * 16 * COLUMNS + column * 16) * 4)
            e.tile("tilestored64", tile * columns + column, there, I64(COLUMNS * 4))


@_emitted
def _by_dots(
    e: _Emit,
    x: ir.Value,
    x_at: ir.Value,
    rows: int,
    w: ir.Value,
    w_at: ir.Value,
    w_pair: ir.Value,
    blocks: ir.Value,
    columns: int,
    ahead: int,
    out: ir.Value,
    out_at: ir.Value,
) -> None:
    """Compute the same as `_by_tiles`, with dot products, for `rows` rows; out_at: bytes to the first of them."""
    sums = [[e.vector() for _ in range(columns)] for _ in range(rows)]
    with cgutils.for_range(e.b, blocks) as block, cgutils.for_range(e.b, I64(16)) as pair:
        here = e.at(x, x_at, e.mul(block.index, ROWS * 64), e.mul(pair.index, 4))
        base = e.at(w, w_at, e.b.mul(e.b.add(e.mul(block.index, 16), pair.index), w_pair))
        weights = [e.load(e.at(base, column * 64), VEC_I32) for column in range(columns)]
        if ahead:
            for column in range(columns):
                e.prefetch(e.at(base, _AHEAD + column * 64))
        for row in range(rows):
            both = e.splat(e.load(e.at(here, row * 64), I32))
            for column in range(columns):
                slot = sums[row][column]
                e.b.store(e.dot(e.b.load(slot), both, weights[column]), slot)
    for row in range(rows):
        for column in range(columns):
            e.store(e.b.load(sums[row][column]), e.at(out, out_at, (row * COLUMNS + column * 16) * 4))


@_emitted
def _finish(
    e: _Emit,
    sums: ir.Value,
    rows: ir.Value,
    bias: ir.Value | int,
    bias_at: ir.Value,
    residual: ir.Value | int,
    out: ir.Value,
    at: ir.Value,
    row_bytes: ir.Value,
) -> None:
    """Add bias and residual to rows of COLUMNS sums, round them, and store them to `out`. bias fp32, from byte bias_at
    on. residual and out bf16, from byte `at` on, with row_bytes bytes from row to row. For bias or residual a tuple in
    place of an array means that there is none."""
    biases = None if isinstance(bias, int) else [e.load(e.at(bias, bias_at, half * 64), VEC) for half in (0, 1)]
    with cgutils.for_range(e.b, rows) as loop:
        here, parts = e.b.mul(loop.index, row_bytes), []
        for half in (0, 1):
            part = e.load(e.at(sums, e.mul(loop.index, COLUMNS * 4), half * 64), VEC)
            if biases is not None:
                part = e.b.fadd(part, biases[half])
            if not isinstance(residual, int):
                part = e.b.fadd(part, e.bf16(e.at(residual, at, here, half * 32)))
            parts.append(part)
        e.store_rounded(parts[0], parts[1], e.at(out, at, here))


@_emitted
def _finish_gated(
    e: _Emit, gates: ir.Value, ups: ir.Value, rows: ir.Value, out: ir.Value, at: ir.Value, row_bytes: ir.Value
) -> None:
    """Store rows of silu(gate) * up, rounded, to `out`."""
    with cgutils.for_range(e.b, rows) as loop:
        parts = []
        for half in (0, 1):
            gate, up = (e.load(e.at(x, e.mul(loop.index, COLUMNS * 4), half * 64), VEC) for x in (gates, ups))
            parts.append(e.b.fmul(e.swish(gate), up))
        e.store_rounded(parts[0], parts[1], e.at(out, at, e.b.mul(loop.index, row_bytes)))


# --- compiled ---------------------------------------------------------------------------------------------------------


class ExactProduct(NamedTuple):
    """A linear layer whose sums have the same order for any number of rows. words: the bf16 weight in blocks [blocks,
    pairs of inputs, outputs of a block, 2], as flat uint32. bias fp32 [outputs], or of size 0. lanes: a tuple whose
    length is the vectors of 16 outputs in a block. by_tiles: a tuple of length 1 to multiply with AMX, else of length
    0."""

    words: Words
    bias: Fp32
    inputs: int
    outputs: int
    lanes: Constant
    by_tiles: Constant


@compiled()
def _some(
    x: Bf16,
    x_at: int,
    rows: int,
    words: Words,
    w_at: int,
    w_pair: int,
    blocks: int,
    columns: Constant,
    by_tiles: Constant,
    sums: Fp32,
) -> None:
    """Compute sums for the first `rows` rows of a group of ROWS rows, over `blocks` * 32 inputs. x_at, w_at: bytes to
    the group's first input and to the first weight. w_pair: bytes from one pair of inputs to the next. columns,
    by_tiles: tuples whose lengths are the vectors of 16 outputs, and 1 to multiply with AMX."""
    if len(by_tiles):
        if rows > 16:
            _by_tiles(x, x_at, (0, 0), words, w_at, w_pair, blocks, columns, (), sums)
        else:
            _by_tiles(x, x_at, (0,), words, w_at, w_pair, blocks, columns, (0,), sums)
        return
    row = 0
    while row + 12 <= rows:
        _by_dots(x, x_at + row * 64, (0,) * 12, words, w_at, w_pair, blocks, columns, (), sums, row * COLUMNS * 4)
        row += 12
    while row + 4 <= rows:
        _by_dots(x, x_at + row * 64, (0,) * 4, words, w_at, w_pair, blocks, columns, (0,), sums, row * COLUMNS * 4)
        row += 4
    while row < rows:
        _by_dots(x, x_at + row * 64, (0,), words, w_at, w_pair, blocks, columns, (0,), sums, row * COLUMNS * 4)
        row += 1


@compiled()
def _tile_shape() -> NDArray[np.uint8]:
    """Return the tile configuration for AMX: all tiles have 16 rows of 64 bytes."""
    shape = np.zeros(64, np.uint8)
    shape[0] = 1
    for tile in range(8):
        shape[16 + 2 * tile] = 64
        shape[48 + tile] = 16
    return shape


@compiled()
def _sums(
    x: Bf16,
    group: int,
    rows: int,
    pairs: int,
    words: Words,
    block: int,
    half: int,
    lanes: Constant,
    by_tiles: Constant,
    sums: Fp32,
) -> None:
    """Compute sums of up to ROWS rows for up to COLUMNS outputs of a block. group: the rows, from row group * ROWS on.
    half: which COLUMNS outputs of the block; the last half may have fewer. pairs: of inputs."""
    w_pair = len(lanes) * 64
    w_at = block * pairs * w_pair + half * 128
    if len(lanes) - 2 * half >= 2:
        _some(x, group * pairs * 4, rows, words, w_at, w_pair, pairs // 16, (0, 0), by_tiles, sums)
    else:
        _some(x, group * pairs * 4, rows, words, w_at, w_pair, pairs // 16, (0,), by_tiles, sums)


@compiled()
def _rest(sums: Fp32, rows: int, width: int, bias: Fp32, residual: Bf16, out: Bf16, group: int, first: int) -> None:
    """Add bias and residual to sums, round them and store them, like `_finish`, for `width` outputs (fewer than
    COLUMNS) from output `first` on. group: index of the first of the rows."""
    for row in range(rows):
        for i in range(width):
            total = sums[row, i]
            if len(bias):
                total += bias[first + i]
            if len(residual):
                total += widened(residual[group + row, first + i])
            out[group + row, first + i] = rounded(total)


@compiled()
def _plan(rows: int, pairs: int, blocks: int) -> tuple[int, int, int, int]:
    """Return (rows of a strip, number of strips, blocks of a run, number of runs). A strip is a part of the rows and a
    run a part of the outputs' blocks, as large as a processor's cache allows. pairs: of inputs."""
    strip = max(ROWS, _STRIP_BYTES // (pairs * 4) // ROWS * ROWS)
    run = 1 if rows <= ROWS else max(1, min(_RUN_BLOCKS, _RUN_BYTES // (pairs * COLUMNS * 4)))
    return strip, (rows + strip - 1) // strip, run, (blocks + run - 1) // run


@compiled(parallel=True, error_model="numpy")
def _linear(
    x: Bf16, pairs: int, words: Words, bias: Fp32, lanes: Constant, by_tiles: Constant, residual: Bf16, out: Bf16
) -> None:
    rows, halves = len(out), (len(lanes) + 1) // 2
    blocks = len(words) // (pairs * len(lanes) * LANES) * halves
    strip, strips, run, runs = _plan(rows, pairs, blocks)
    shape = _tile_shape()
    for task in prange(strips * runs):
        begin, at_block = task // runs * strip, task % runs * run
        sums = np.empty((ROWS, COLUMNS), np.float32)
        if len(by_tiles):
            _configure(shape)
        for group in range(begin, min(rows, begin + strip), ROWS):
            count = min(ROWS, rows - group)
            for part in range(at_block, min(blocks, at_block + run)):
                block, half = part // halves, part % halves
                _sums(x, group, count, pairs, words, block, half, lanes, by_tiles, sums)
                first = block * len(lanes) * LANES + half * COLUMNS
                width = min(min(COLUMNS, len(lanes) * LANES - half * COLUMNS), out.shape[1] - first)
                at, row = (group * out.shape[1] + first) * 2, out.shape[1] * 2
                if width < COLUMNS:
                    _rest(sums, count, width, bias, residual, out, group, first)
                elif len(bias) and len(residual):
                    _finish(sums, count, bias, first * 4, residual, out, at, row)
                elif len(bias):
                    _finish(sums, count, bias, first * 4, (), out, at, row)
                elif len(residual):
                    _finish(sums, count, (), 0, residual, out, at, row)
                else:
                    _finish(sums, count, (), 0, (), out, at, row)
        if len(by_tiles):
            _release()


@compiled(parallel=True, error_model="numpy")
def _gated(x: Bf16, pairs: int, gate: Words, up: Words, lanes: Constant, by_tiles: Constant, out: Bf16) -> None:
    rows, blocks = len(out), out.shape[1] // COLUMNS
    strip, strips, run, runs = _plan(rows, pairs, blocks)
    halves, shape = (len(lanes) + 1) // 2, _tile_shape()
    for task in prange(strips * runs):
        begin, at_block = task // runs * strip, task % runs * run
        gates, ups = np.empty((ROWS, COLUMNS), np.float32), np.empty((ROWS, COLUMNS), np.float32)
        if len(by_tiles):
            _configure(shape)
        for group in range(begin, min(rows, begin + strip), ROWS):
            count = min(ROWS, rows - group)
            for part in range(at_block, min(blocks, at_block + run)):
                _sums(x, group, count, pairs, gate, part // halves, part % halves, lanes, by_tiles, gates)
                _sums(x, group, count, pairs, up, part // halves, part % halves, lanes, by_tiles, ups)
                at = (group * out.shape[1] + part * COLUMNS) * 2
                _finish_gated(gates, ups, count, out, at, out.shape[1] * 2)
        if len(by_tiles):
            _release()


@compiled()
def _pack(x: Bf16, group: int, to: Bf16) -> None:
    """Pack the rows from group * ROWS on in the layout of `_packed`. Rows that are missing at the end count as 0, as
    far as the last tile is read."""
    inputs, first = x.shape[1], group * ROWS
    count = min(ROWS, len(x) - first)
    for block in range(len(to)):
        width = min(32, inputs - block * 32)
        for row in range(count):
            for i in range(width):
                to[block, row, i] = x[first + row, block * 32 + i]
            to[block, row, width:] = 0
        to[block, count : (count + 15) // 16 * 16] = 0


@compiled(parallel=True)
def _pack_together(x: Bf16, out: Bf16) -> None:
    for group in prange(len(out)):
        _pack(x, group, out[group])


@compiled()
def _packed(x: Bf16) -> Bf16:
    """Pack bf16 [rows, inputs] into [groups, blocks of 32 inputs, ROWS, 32], so that each tile is contiguous."""
    rows, inputs = x.shape
    out = np.empty(((rows + ROWS - 1) // ROWS, (inputs + 31) // 32, ROWS, 32), np.uint16)
    if len(out) < 4:  # faster than waking the other threads
        for group in range(len(out)):
            _pack(x, group, out[group])
    else:
        _pack_together(x, out)
    return out


@compiled()
def linear(x: Bf16, product: ExactProduct, residual: Bf16, out: Bf16) -> None:
    """Compute a linear layer: x bf16 [rows, inputs] -> out bf16 [rows, outputs]. residual bf16 [rows, outputs] is added
    before rounding; it may have no rows."""
    pairs = (product.inputs + 31) // 32 * 16
    _linear(_packed(x), pairs, product.words, product.bias, product.lanes, product.by_tiles, residual, out)


@compiled()
def gated(x: Bf16, gate: ExactProduct, up: ExactProduct, out: Bf16) -> None:
    """Compute silu(gate(x)) * up(x): x bf16 [rows, inputs] -> bf16 [rows, outputs], rounded once. Neither layer may
    have a bias. Outputs come in blocks of 32 or 64 and must be a multiple of the block."""
    pairs = (gate.inputs + 31) // 32 * 16
    _gated(_packed(x), pairs, gate.words, up.words, gate.lanes, gate.by_tiles, out)


def self_test(by_tiles: bool) -> None:
    """Compile everything with the types of later calls, and check the results. Raises an error if anything is wrong."""
    rng = np.random.default_rng(0)
    inputs, outputs, rows = 64, 64, 35
    tiles, nothing = ((0,) if by_tiles else ()), np.empty((0, 0), np.uint16)

    def bf16(*shape: int) -> tuple[Bf16, Fp32]:
        wide = rng.standard_normal(shape, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return (wide >> 16).astype(np.uint16), wide.view(np.float32)

    (x, wide_x), (w, wide_w) = bf16(rows, inputs), bf16(outputs, inputs)
    words = w.reshape(outputs // 32, 32, inputs // 2, 2).transpose(0, 2, 1, 3).copy().reshape(-1).view(np.uint32)
    want = wide_x @ wide_w.T
    for bias, residual in ((np.empty(0, np.float32), nothing), (np.ones(outputs, np.float32), bf16(rows, outputs)[0])):
        product = ExactProduct(words, bias, inputs, outputs, (0, 0), tiles)
        out = np.empty((rows, outputs), np.uint16)
        linear(x, product, residual, out)
        wanted = want
        if len(bias):
            wanted = want + 1 + (residual.astype(np.uint32) << 16).view(np.float32)
        if not np.allclose((out.astype(np.uint32) << 16).view(np.float32), wanted, rtol=2**-7, atol=2**-5):
            raise RuntimeError("compiled products of one order are wrong")
    gated(x, product._replace(bias=np.empty(0, np.float32)), product._replace(bias=np.empty(0, np.float32)), out)
    with np.errstate(over="ignore"):
        wanted = want / (1 + np.exp(-want)) * want
    if not np.allclose((out.astype(np.uint32) << 16).view(np.float32), wanted, rtol=2**-7, atol=2**-5):
        raise RuntimeError("compiled gated products of one order are wrong")
