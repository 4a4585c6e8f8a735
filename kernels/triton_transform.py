"""Decodes the numbers of transform coding on CUDA. Importing it needs Triton. `reprise.kernels.cpu.transform` documents
a segment and decodes it on processors, to the same numbers.

A stream can only be read from its beginning: each state says which word comes next. So a program reads some blocks'
streams component by component, one number of each lane at a time. Most of the time each step waits for the previous
one, so more blocks at the same time cost little. With TRITON_INTERPRET=1 in the environment before the import, this
runs on CPU tensors in Triton's interpreter.
"""

import triton
import triton.language as tl
from torch import Tensor

from reprise.kernels.cpu import transform_format as form

_BLOCKS = 4  # blocks of one program: their lanes are as many as a warp's threads
_LANES, _GROUPS, _ROWS = (tl.constexpr(number) for number in (form.LANES, form.GROUPS, form.ROWS))
_FINEST, _COARSEST = tl.constexpr(form.FINEST), tl.constexpr(form.COARSEST)
_LEAST_CLASS, _LARGEST_CLASS = tl.constexpr(form.LEAST_CLASS), tl.constexpr(form.LARGEST_CLASS)
_SYMBOLS, _REACH, _ESCAPE = tl.constexpr(form.SYMBOLS), tl.constexpr(form.REACH), tl.constexpr(form.ESCAPE)
_ESCAPE_BITS, _ESCAPED = tl.constexpr(form.ESCAPE_BITS), tl.constexpr(form.ESCAPED)
_BITS, _MASK, _LEAST_STATE = (tl.constexpr(number) for number in (form.PROBABILITY_BITS, form.MASK, form.LEAST_STATE))


@triton.jit  # type: ignore[untyped-decorator]
def _word(words_ptr: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the 16-bit words at `at`, as uint32; 0 where the mask is False."""
    return (tl.load(words_ptr + at, mask=mask, other=0).to(tl.int32) & 0xFFFF).to(tl.uint32)


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def _decode(
    words_ptr: tl.tensor,  # [blocks, size] int16
    classes_ptr: tl.tensor,  # [components] int32, the first n of K
    entries_ptr: tl.tensor,  # [classes, 2^PROBABILITY_BITS] int32
    values_ptr: tl.tensor,  # [classes, SYMBOLS] fp32
    out_ptr: tl.tensor,  # [blocks, components, ROWS] fp32
    blocks: tl.tensor,
    size: tl.tensor,
    begin: tl.tensor,  # first of the coder's words
    n: tl.tensor,
    components: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Decode all numbers of some blocks. Corrupt words give wrong numbers, and never an access outside of memory."""
    block = tl.program_id(0) * tile + tl.arange(0, tile)
    is_block = block < blocks
    lane = tl.arange(0, _LANES)
    inside = is_block[:, None] & (lane < _LANES)[None, :]
    first_word = block.to(tl.int64) * size
    coarser = tl.load(words_ptr + first_word, mask=is_block, other=0).to(tl.int32) & 0xFF
    coarser = tl.minimum(coarser, _FINEST + _COARSEST) - _FINEST
    states_at = first_word[:, None] + 1 + 2 * lane[None, :]
    state = _word(words_ptr, states_at, inside) | (_word(words_ptr, states_at + 1, inside) << 16)
    place = tl.zeros((tile,), tl.int32) + begin
    out = out_ptr + block[:, None].to(tl.int64) * components * _ROWS + lane[None, :]
    for component in range(components):
        # Steps are coarser by so many quarter octaves: K and V take turns, V first.
        kind = tl.load(classes_ptr + component) - ((coarser + (component >= n).to(tl.int32)) >> 1)
        has_numbers = kind >= _LEAST_CLASS
        low = tl.maximum(kind - _LARGEST_CLASS + 3, 0) // 4
        table = tl.where(has_numbers, kind - 4 * low - _LEAST_CLASS, 0)
        low_bits = tl.where(has_numbers, low, 0)[:, None]
        lives = inside & has_numbers[:, None]
        for group in tl.static_range(_GROUPS):
            slot = (state & _MASK).to(tl.int32)
            entry = tl.load(entries_ptr + (table[:, None] << _BITS) + slot, mask=lives, other=0)
            entry = entry.to(tl.uint32, bitcast=True)
            symbol = (entry & 0xFF).to(tl.int32)
            x = ((entry >> 8) & 0xFFF) * (state >> _BITS) + (entry >> 20)
            is_escaped = symbol == _ESCAPE
            bits = tl.where(is_escaped, _ESCAPE_BITS, low_bits).to(tl.uint32)
            # A state that is short takes a word; one that is short again without its low bits takes another. The first
            # word does not change whether it is, as it is less than what the low bits leave.
            is_short = x < _LEAST_STATE
            x = tl.where(is_short, x << 16, x)
            is_short_again = (bits > 0) & ((x >> bits) < _LEAST_STATE)
            taken = is_short.to(tl.int32) + is_short_again.to(tl.int32)
            taken = tl.where(lives, taken, 0)
            at = place[:, None] + tl.cumsum(taken, 1) - taken
            after = at + is_short.to(tl.int32)
            x |= _word(words_ptr, first_word[:, None] + tl.minimum(at, size - 1), lives & is_short)
            again = _word(words_ptr, first_word[:, None] + tl.minimum(after, size - 1), lives & is_short_again)
            rest = (x & ((tl.full((tile, _LANES), 1, tl.uint32) << bits) - 1)).to(tl.int32)
            x = x >> bits
            x = tl.where(is_short_again, (x << 16) | again, x)
            value = tl.load(values_ptr + table[:, None] * _SYMBOLS + symbol, mask=lives, other=0.0)
            one = tl.full((tile, _LANES), 1, tl.int32) << low_bits
            whole = tl.where(is_escaped, rest - _ESCAPED, (symbol - _REACH) * one + rest - (one >> 1))
            number = tl.where(bits == 0, value, whole.to(tl.float32))
            number = tl.where(lives, number, 0.0)
            tl.store(out + component * _ROWS + group * _LANES, number, mask=inside)
            state = tl.where(lives, x, state)
            place = tl.minimum(place + tl.sum(taken, 1), size - 1)


def decode(words: Tensor, classes: Tensor, entries: Tensor, values: Tensor, begin: int, n: int) -> Tensor:
    """Return the components of blocks, in steps: fp32 [blocks, n + m, ROWS], K's n first.

    words int16 [blocks, words of a segment], contiguous; classes int32 [n + m]; entries int32, values fp32: from
    `transform_format.Tables`; begin: the place of the coder's first word. All on one device."""
    blocks, size = words.shape
    components = classes.shape[0]
    out = values.new_empty(blocks, components, form.ROWS)
    if blocks:
        grid = (triton.cdiv(blocks, _BLOCKS),)
        _decode[grid](
            words, classes, entries, values, out, blocks, size, begin, n, components, tile=_BLOCKS, num_warps=1
        )
    return out
