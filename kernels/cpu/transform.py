"""Codes a layer's blocks by a transform, compiled by numba. Rows become components and whole numbers, and these a
stream of constant size by an entropy coder (rANS, Duda 2013: https://arxiv.org/abs/1311.2540). Decoding does the
reverse.

A segment, as uint16 words in little-endian order:

    word 0           FINEST plus the eighths of an octave by which the steps are coarser than calibrated
    words 1 .. 16    the coder's LANES final states, low word first
    then             an exponent for each row and head of V, a byte each: V is scaled by 2^(exponent / 4)
    then             the coder's words, in the order in which decoding reads them, and zeros

The coder has LANES (eight) states, called lanes. It codes one component after the other, and of each component the
numbers of the block's 32 rows; lane r mod LANES codes the number of row r. With AVX-512 the lanes of a block are one
vector. TOGETHER blocks are then coded at the same time, so that their chains of dependent instructions overlap. Without
AVX-512 the lanes take turns. They also do where a number is escaped (its table lacks it, so that its bits are stored).
The bytes are the same. Import this through `reprise.kernels.codecs.transform`.

`transform_format` has the constants, `transform_streams` the coder's vector code, `transform_vectors` that of the rows.
"""

import math

import numpy as np
from numba import config, prange
from numba.core.registry import cpu_target
from numpy.typing import NDArray

from reprise.kernels.cpu.emit import compiled
from reprise.kernels.cpu.transform_format import (
    COARSEST,
    ESCAPE,
    ESCAPE_BITS,
    ESCAPED,
    FINEST,
    GROUPS,
    HEAD_WORDS,
    LANES,
    LARGEST_CLASS,
    LARGEST_DEVIATION,
    LEAST_CLASS,
    LEAST_DEVIATION,
    LEAST_STATE,
    MASK,
    POWERS,
    PROBABILITY_BITS,
    REACH,
    ROWS,
    TILE,
    TOGETHER,
    Bits,
    Layer,
    Scratch,
    Tables,
)
from reprise.kernels.cpu.transform_streams import decode_plain, decode_with_low, encode_plain
from reprise.kernels.cpu.transform_vectors import (
    multiply_tile,
    row_energies,
    scale_rows,
    spread_tile,
    store_k,
    store_v_tile,
    sum_of_squares,
)
from reprise.kernels.views import Fp32


def _has_vectors() -> bool:
    """Return whether the vector code of `_Reader` and `_Writer` can be used: whether numba compiles for a processor
    with its instructions, without which LLVM would end the process. False if numba is to check every index
    (NUMBA_BOUNDSCHECK), because vector code works on pointers."""
    if config.BOUNDSCHECK:  # type: ignore[attr-defined]
        return False
    features = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
    return features >= {"+avx2", "+avx512f", "+avx512vl", "+avx512dq", "+avx512bw"}


@compiled()
def _decode_groups(
    segments: Bits, row: int, last: int, tables: Tables, scratch: Scratch, component: int, group: int, has_low: bool
) -> int:
    """Decode a component from `group` on, for the sides (blocks that are coded together) in scratch.chosen. A group is
    one number of each lane. It does the same as `_decode_group`, for eight lanes and TOGETHER sides at once. row: of
    the first side in `segments`. last: the last of a segment's words. has_low: whether some side stores low bits as
    they are. Returns GROUPS, or the group before which it stopped, since a number in it is escaped or a stream is near
    its end."""
    # A shift: a division could raise, and what can raise is not inlined, which would make decoding half as fast.
    size, sides = segments.strides[0] >> 1, scratch.components
    entries, values, states, places = tables.entries, tables.values, scratch.states, scratch.places
    side_size, chosen = sides.shape[1] * ROWS, scratch.chosen
    stopped: int
    if has_low:
        stopped = decode_with_low(
            segments, size, row, last, entries, values, states, places, sides, side_size, chosen, component, group
        )
    else:
        stopped = decode_plain(
            segments, size, row, last, entries, values, states, places, sides, side_size, chosen, component, group
        )
    return stopped


@compiled()
def _encode_groups(tables: Tables, scratch: Scratch, component: int, group: int) -> int:
    """Encode a component from `group` down to 0, for the sides (blocks that are coded together) in scratch.chosen, of
    which none may store low bits as they are. A group is one number of each lane. It does the same as `_encode_group`,
    for eight lanes and TOGETHER sides at once. Returns -1, or the group before which it stopped, since a number in it
    is escaped."""
    words, sides, chosen, finer = scratch.words, scratch.components, scratch.chosen, scratch.finer
    frequencies, starts, states, places = tables.frequencies, tables.starts, scratch.states, scratch.places
    size, side_size = words.shape[1], sides.shape[1] * ROWS
    stopped: int = encode_plain(
        words, size, frequencies, starts, states, places, sides, side_size, chosen, finer, component, group
    )
    return stopped


if not _has_vectors():

    @compiled()
    def _encode_groups(tables: Tables, scratch: Scratch, component: int, group: int) -> int:
        """Encode no group, where there are no vectors."""
        return group

    @compiled()
    def _decode_groups(
        segments: Bits, row: int, last: int, tables: Tables, scratch: Scratch, component: int, group: int, has_low: bool
    ) -> int:
        """Decode no group, where there are no vectors."""
        return group


@compiled()
def _to_floats(bits: Bits, shift: int, out: Fp32) -> None:
    """Convert bits [any] of bf16 (shift 16) or fp32 (shift 0) to fp32."""
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
    """Return by how many quarter octaves the steps of K, or of V, are coarser than calibrated. coarser: in eighths of
    an octave, over K and V in the mean. An eighth more makes one of them coarser by a quarter, in turn and V first."""
    return (coarser + is_v) >> 1


@compiled()
def _quarters_of(variance: float) -> int:
    """Return the standard deviation in quarter octaves, 4 * log2(sqrt(variance)), rounded. variance: finite and above
    zero."""
    part, exponent = math.frexp(variance)  # part is at least 1/2
    return int(2 * exponent - 2 + (part >= 2.0**-0.75) + (part >= 2.0**-0.25))


@compiled()
def class_of(base: int, quarters: int) -> tuple[int, int]:
    """Return (entropy coder's table, low bits of each number that are stored as they are) for a component. Its table is
    -1 if all its numbers are 0. base: the class at the calibrated step, in quarter octaves. quarters: by how many
    quarter octaves the step is coarser. A component that varies more than any table allows has low bits."""
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
    """Decode blocks. segments uint16 [blocks, size_words]; raw [blocks, ROWS * (n + m)] receives the rows as bits, of
    bf16 if shift is 16, of fp32 if it is 0. n and m: numbers of K and of V in a row."""
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
    """Decode blocks like `decode`, with all threads of the team. rooms: scratch memory, with one more axis before those
    of `Scratch`; its length is the number of parts into which the blocks are divided."""
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
    """Decode the numbers of `count` segments, from `row` on, into scratch.components. Stores in scratch.live for each
    segment the component of K from which on all are zero. last: the last of a segment's words. n: components of K."""
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
        # Unused places repeat the first side, which is then decoded several times at once, to the same memory.
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
    """Decode one number of each lane of a side (one block's stream), one lane after the other, for groups that vectors
    cannot decode. low: how many low bits of a number are stored as they are. c: the component. group: which LANES of
    its numbers."""
    states, out = scratch.states[side], scratch.components[side, c]
    entries, values = tables.entries[table], tables.values[table]
    at = scratch.places[side]
    for lane in range(LANES):
        x = states[lane]
        entry = entries[x & np.uint32(MASK)]
        symbol = entry & np.uint32(0xFF)
        x = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(PROBABILITY_BITS)) + (entry >> np.uint32(20))
        # Without a branch, which would be foretold wrong every third time.
        is_short = x < np.uint32(LEAST_STATE)
        x = x << np.uint32(16 * is_short) | np.uint32(words[at] * is_short)
        at = min(at + is_short, last)
        number = values[symbol]
        bits = ESCAPE_BITS if symbol == ESCAPE else low
        if bits:
            rest = np.int64(x & np.uint32((1 << bits) - 1))
            x >>= np.uint32(bits)
            if x < LEAST_STATE:
                x = x << np.uint32(16) | np.uint32(words[at])
                at = min(at + 1, last)
            if symbol == ESCAPE:
                number = np.float32(rest - ESCAPED)
            else:
                number = np.float32((np.int64(symbol) - REACH) * (1 << low) + rest - (1 << low >> 1))
        states[lane] = x
        out[group * LANES + lane] = number
    scratch.places[side] = at


@compiled()
def _store_keys(
    layer: Layer, scratch: Scratch, components: Fp32, live: int, n: int, quarters: int, shift: int, raw: Bits
) -> None:
    """Transform a block's components back to its keys, and store their bits in `raw`. live: the components from here on
    are zero in every row. n: numbers of a row. quarters: by how many quarter octaves the step is coarser than
    calibrated. shift: 16 to store bf16, 0 for fp32."""
    rows, columns = TILE
    width = layer.back.shape[1]
    flat, back, product = components.reshape(-1), layer.back.reshape(-1), scratch.product.reshape(-1)
    scale = np.float32(2.0 ** (quarters / 4))
    for r in range(0, ROWS, rows):
        for j in range(0, width, columns):
            multiply_tile(flat, r, ROWS, back, j, width, live, product, r * width + j, width)
    for r in range(ROWS):
        store_k(product, r * width, layer.k_mean, scale, n, raw, r * n)
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
            scales[r] = np.float32(layer.v_step * POWERS[quarter + len(POWERS) // 2])
        first, last = head * width, (head + 1) * width
        tiled = first + width // 16 * 16
        for r in range(0, ROWS, 16):
            for i in range(first, tiled, 16):
                at = ROWS * n + r * m + i
                store_v_tile(flat, (n + i) * ROWS + r, scales, r, layer.v_mean, i, raw, at, m)
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
    """Encode blocks. raw [blocks, ROWS * (n + m)] as bits; segments uint16 [blocks, size_words]; encoded bool [blocks]
    tells which could be encoded."""
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
    """Store a block's rows minus their means as components, from out[at] on. The rows begin at raw[first], `step`
    elements from each other, and have `count` numbers."""
    for r in range(0, ROWS, 16):
        for i in range(0, count - count % 16, 16):
            spread_tile(raw, first + r * step + i, step, means, i, out, at + i * ROWS + r)
    for i in range(count - count % 16, count):
        for r in range(ROWS):
            place = first + r * step + i
            _to_floats(raw[place : place + 1], shift, scratch.number)
            out[at + i * ROWS + r] = scratch.number[0] - means[i]


@compiled()
def _k_to_components(raw: Bits, shift: int, layer: Layer, scratch: Scratch, components: Fp32, n: int) -> bool:
    """Convert a block's keys to components. Notes in scratch.deviations how much each component deviates, in quarter
    octaves. Returns whether all are finite."""
    rows, _ = TILE
    width = layer.into.shape[1]
    centred, into, out = scratch.product.reshape(-1), layer.into.reshape(-1), components.reshape(-1)
    _spread(raw, 0, n, n, shift, layer.k_mean, scratch, centred, 0)
    for j in range(0, width, rows):  # rows of the result are components, its columns a block's rows
        multiply_tile(into, j, width, centred, 0, ROWS, n, out, j * ROWS, ROWS)
    return bool(_deviations(components, scratch, 0, n))


@compiled()
def _v_to_components(
    raw: Bits, shift: int, words: Bits, layer: Layer, scratch: Scratch, components: Fp32, n: int, m: int
) -> bool:
    """Convert a block's values to components, write the scales' exponents, and note how much each component deviates.
    Returns whether all are finite."""
    heads, width = layer.heads, m // layer.heads
    exponents, scales = words[HEAD_WORDS:].view(np.int8), scratch.product.reshape(-1)
    flat = components.reshape(-1)
    _spread(raw, ROWS * n, m, m, shift, layer.v_mean, scratch, flat, n * ROWS)
    for head in range(heads):
        at = (n + head * width) * ROWS
        for r in range(0, ROWS, 16):
            row_energies(flat, at + r, width, scales, r)
        for r in range(ROWS):
            energy = scales[r]
            if not np.isfinite(energy):
                return False
            quarter = min(max(_quarters_of(max(energy / width, np.float32(1e-18))), -127), 127)
            exponents[r * heads + head] = quarter
            scales[r] = np.float32(1 / (layer.v_step * POWERS[quarter + len(POWERS) // 2]))
        for r in range(0, ROWS, 16):
            scale_rows(flat, at + r, width, scales, r)
    return bool(_deviations(components, scratch, n, n + m))


@compiled()
def _deviations(components: Fp32, scratch: Scratch, first: int, last: int) -> bool:
    """Note how much components deviate in this block. Returns whether all are finite."""
    flat = components.reshape(-1)
    total = np.float32(0)
    for c in range(first, last):
        energy = sum_of_squares(flat, c * ROWS)
        total += energy
        if np.isfinite(energy):
            scratch.deviations[c] = _quarters_of(max(energy / ROWS, np.float32(1e-12)))
    return bool(np.isfinite(total))


@compiled()
def _finest(n: int, tables: Tables, layer: Layer, scratch: Scratch, bits: int) -> int:
    """Return the least number of eighths of an octave by which the steps must be coarser than calibrated, negative if
    they may be finer, for a block's code to fit into `bits`. It is a prediction from how much each component deviates
    in this block."""
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
    """Return the predicted bits of a block's numbers with steps that are so much coarser (`coarser`, in eighths of an
    octave)."""
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
    """Code the numbers of `count` sides (blocks that are coded together), from the last component to the first. Leaves
    out sides whose steps are coarser than COARSEST. Stops coding a side once it has more than `room` words. Notes each
    side's count of words in scratch.places. Returns whether there was any side to code."""
    classes, chosen, places = layer.classes, scratch.chosen, scratch.places
    for side in range(count):
        scratch.states[side] = LEAST_STATE
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
                scratch.finer[side] = np.float32(POWERS[len(POWERS) // 2 - quarters])
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
    """Encode one number of each lane of a side (one block's stream), the last lane first, for groups that vectors
    cannot encode. low: how many low bits of a number are stored as they are. c: the component. group: which LANES of
    its numbers."""
    states, out, used = scratch.states[side], scratch.words[side], scratch.places[side]
    frequencies, starts = tables.frequencies[table], tables.starts[table]
    half, finer = 1 << low >> 1, scratch.finer[side]
    for lane in range(LANES - 1, -1, -1):
        x = states[lane]
        number = int(np.rint(scratch.components[side, c, group * LANES + lane] * finer))
        number = min(max(number, -ESCAPED), ESCAPED - 1)
        symbol = ((number + half) >> low) + REACH
        if symbol < 0 or symbol >= ESCAPE or frequencies[symbol] == 0:
            bits, rest, symbol = ESCAPE_BITS, number + ESCAPED, ESCAPE
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
