"""Emits the entropy coder of transform coding for several streams at once, the lanes of each in one vector.

Import this through `reprise.kernels.codecs.transform`.
"""

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from reprise.kernels.cpu.transform_format import (
    ESCAPE,
    ESCAPED,
    GROUPS,
    LANES,
    LEAST_STATE,
    MASK,
    PROBABILITY_BITS,
    REACH,
    ROWS,
    SYMBOLS,
    TOGETHER,
)
from reprise.kernels.cpu.transform_vectors import I16, I32, I64, LANES_F32, LANES_F64, LANES_I32, Emit, vector_code


class _Stream:
    """A stream of the entropy coder: the lanes' states and the place in the words, which stay in registers until
    `keep`."""

    def __init__(self, e: Emit, words: Any, states: Any, place: Any) -> None:
        """Load states and place. words, states, place: pointers to the words, to the lanes' states, and to the index of
        the next word."""
        self._e, self._words, self._states, self._places = e, words, states, place
        self._state, self._place = e.variable(e.load(states, LANES_I32)), e.variable(e.b.load(place))

    def keep(self) -> None:
        """Store states and place in memory."""
        self._e.store(self._e.b.load(self._state), self._states)
        self._e.b.store(self._e.b.load(self._place), self._places)


class _Reader(_Stream):
    """An emitter of the decoding of one stream, one number of each lane (interleaved coder state) at a time."""

    def __init__(self, *stream: Any, entries: Any, values: Any, out: Any, low: Any, last: Any) -> None:
        """Set up. stream: the arguments of `_Stream`. entries, values: pointers to the table of the component's class.
        out: pointer to the decoded numbers. low: how many low bits are stored as they are, None for 0. last: index of
        the last word."""
        super().__init__(*stream)
        self._entries, self._values, self._out, self._last = entries, values, out, last
        self._low = None if low is None else self._e.b.trunc(low, I32)

    def look(self, group: Any) -> Any:
        """Look up the lanes' symbols. Returns whether `take` may continue: no number is escaped (stored outside the
        tables), and words are left."""
        e, b = self._e, self._e.b
        self._group, self._x = group, b.load(self._state)
        self._entry = e.gather(LANES_I32, self._entries, b.and_(self._x, _lanes(MASK)))
        self._symbol = b.and_(self._entry, _lanes(0xFF))
        is_plain = e.none(b.icmp_unsigned("==", self._symbol, _lanes(ESCAPE)))
        # All of the words may be taken, and then the place is that of a word still.
        end = b.add(b.load(self._place), I64(LANES if self._low is None else 2 * LANES))
        return b.and_(is_plain, b.icmp_signed("<=", end, self._last))

    def take(self) -> None:
        """Store the numbers of the group that `look` has found, and compute the next states."""
        e, b = self._e, self._e.b
        frequency = b.and_(b.lshr(self._entry, _lanes(8)), _lanes(0xFFF))
        x = b.add(b.mul(frequency, b.lshr(self._x, _lanes(PROBABILITY_BITS))), b.lshr(self._entry, _lanes(20)))
        is_short = b.icmp_unsigned("<", x, _lanes(LEAST_STATE))
        x = b.select(is_short, b.shl(x, _lanes(16)), x)
        number = e.gather(LANES_F32, self._values, self._symbol)
        if self._low is None:
            b.store(b.or_(x, self._next_words(is_short)), self._state)
        else:
            number = b.select(b.icmp_signed("==", self._low, I32(0)), number, self._take_low(x, is_short))
        e.store(number, e.at(self._out, e.times(self._group, LANES)))

    def _take_low(self, x: Any, is_short: Any) -> Any:
        """Compute the next states, and return the numbers of lanes that store low bits as they are. x: states, shifted
        up by the 16 bits of a word where `is_short`, which have not taken in that word yet. A state whose low bits are
        removed may be too small once more (below LEAST_STATE), and then takes another word. That can be told before the
        first word is there: the word fills 16 bits that are 0 so far, and the bound LEAST_STATE << low has none of
        them."""
        e, b = self._e, self._e.b
        low, one = e.splat(self._low, LANES_I32), _lanes(1)
        is_short_again = b.icmp_unsigned("<", b.lshr(x, low), _lanes(LEAST_STATE))
        turns = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
        words = self._next_words(e.shuffle(is_short, is_short_again, turns))
        first, again = (e.shuffle(words, words, range(odd, 2 * LANES, 2)) for odd in (0, 1))
        x = b.or_(x, first)
        rest = b.and_(x, b.sub(b.shl(one, low), one))
        x = b.lshr(x, low)
        b.store(b.select(is_short_again, b.or_(b.shl(x, _lanes(16)), again), x), self._state)
        whole = b.sub(b.shl(b.sub(self._symbol, _lanes(REACH)), low), b.lshr(b.shl(one, low), one))
        return b.sitofp(b.add(whole, rest), LANES_F32)

    def _next_words(self, takes: Any) -> Any:
        """Return the next words of the stream, one for each lane that takes one, and 0 for the others."""
        e, count, place = self._e, takes.type.count, self._e.b.load(self._place)
        e.b.store(e.b.add(place, e.count(takes)), self._place)
        kind = ir.VectorType(I32, count)
        words = e.b.zext(e.load(e.at(self._words, place), ir.VectorType(I16, count)), kind)
        return e.call(f"llvm.x86.avx512.mask.expand.v{count}i32", kind, words, e.splat(0, kind), takes)


class _Writer(_Stream):
    """An emitter of the encoding of one stream, one number of each lane at a time. It cannot store low bits or
    escapes."""

    def __init__(self, *stream: Any, frequencies: Any, starts: Any, numbers: Any, finer: Any) -> None:
        """Set up. stream: the arguments of `_Stream`. frequencies, starts: pointers to the table of the component's
        class. numbers: pointer to the numbers, in calibrated steps. finer: factor that makes them numbers in the
        block's own steps."""
        super().__init__(*stream)
        self._frequencies, self._starts, self._numbers = frequencies, starts, numbers
        self._finer = self._e.splat(finer, LANES_F32)

    def look(self, group: Any) -> Any:
        """Round a group's numbers and look up their symbols. Returns whether `take` may continue: no number is escaped
        (stored outside the tables)."""
        e, b = self._e, self._e.b
        x = b.fmul(e.load(e.at(self._numbers, e.times(group, LANES)), LANES_F32), self._finer)
        for predicate, bound in (("<", -ESCAPED), (">", ESCAPED - 1)):
            bounds = e.splat(float(bound), LANES_F32)
            x = b.select(b.fcmp_ordered(predicate, x, bounds), bounds, x)
        x = e.call(f"llvm.rint.v{LANES}f32", LANES_F32, x)
        symbol = b.add(b.fptosi(x, LANES_I32), _lanes(REACH))
        is_far = b.icmp_unsigned(">=", symbol, _lanes(ESCAPE))
        self._symbol = b.select(is_far, _lanes(ESCAPE), symbol)
        self._frequency = e.gather(LANES_I32, self._frequencies, self._symbol)
        return e.none(b.or_(is_far, b.icmp_unsigned("==", self._frequency, _lanes(0))))

    def take(self) -> None:
        """Encode a group's numbers, the last lane's first."""
        e, b = self._e, self._e.b
        x, place = b.load(self._state), b.load(self._place)
        is_long = b.icmp_unsigned(">=", x, b.shl(self._frequency, _lanes(31 - PROBABILITY_BITS)))
        backwards = range(LANES)[::-1]
        words, leaves = (e.shuffle(v, v, backwards) for v in (b.and_(x, _lanes(0xFFFF)), is_long))
        words = e.call(f"llvm.x86.avx512.mask.compress.v{LANES}i32", LANES_I32, words, words, leaves)
        e.store(words, e.at(self._words, place))  # surplus words are overwritten later
        b.store(b.add(place, e.count(leaves)), self._place)
        x = b.select(is_long, b.lshr(x, _lanes(16)), x)
        # Both are less than 2^31, and as doubles their quotient never rounds up to a whole number.
        quotient = b.fdiv(b.sitofp(x, LANES_F64), b.sitofp(self._frequency, LANES_F64))
        quotient = b.fptosi(quotient, LANES_I32)
        rest = b.sub(x, b.mul(quotient, self._frequency))
        start = e.gather(LANES_I32, self._starts, self._symbol)
        b.store(b.add(b.add(b.shl(quotient, _lanes(PROBABILITY_BITS)), rest), start), self._state)


def _lanes(value: int) -> Any:
    return ir.Constant(LANES_I32, [value] * LANES)


def _run_streams(e: Emit, streams: Sequence[_Reader | _Writer], group: Any, step: int) -> Any:
    """Code one group after the other, from `group` on, as long as all streams can. step: 1 for ascending groups, as in
    decoding, -1 for descending ones, as in encoding. Returns the group before which the streams stopped; GROUPS or -1
    if none is left."""
    b, at = e.b, e.variable(group)
    ahead, look, take, end = (b.append_basic_block(name) for name in ("ahead", "look", "take", "end"))
    b.branch(ahead)
    b.position_at_end(ahead)
    b.cbranch(b.icmp_unsigned("<", b.load(at), I64(GROUPS)), look, end)  # unsigned: not below 0 either
    b.position_at_end(look)
    b.cbranch(functools.reduce(b.and_, [stream.look(b.load(at)) for stream in streams]), take, end)
    b.position_at_end(take)
    for stream in streams:
        stream.take()
    b.store(b.add(b.load(at), I64(step)), at)
    b.branch(ahead)
    b.position_at_end(end)
    for stream in streams:
        stream.keep()
    return b.load(at)


def _decoder(name: str, has_low: bool) -> Any:
    """Make a decoder of a component in vector code. name: of the compiled function. has_low: whether numbers may store
    low bits as they are."""

    def emit(
        e: Emit,
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
    return vector_code(types.int64)(emit)


decode_plain, decode_with_low = _decoder("decode_plain", False), _decoder("decode_with_low", True)


@vector_code(types.int64)
def encode_plain(
    e: Emit,
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
