"""Defines the contents of a segment of transform coding, and the data that coding needs
(`reprise.kernels.cpu.transform`)."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reprise.kernels.views import Fp32, Int64, Words

PROBABILITY_BITS = 12
LEAST_CLASS, LARGEST_CLASS = -14, 8  # quarter octaves of s / d: 0.09 to 4
"""Range of classes with tables. Below the least, everything rounds to zero and costs nothing. Above the largest, the
lowest bits are stored as they are, so that the rest is in the range."""
REACH = 23  # symbols are -REACH .. REACH, and ESCAPE
SYMBOLS = 2 * REACH + 2
ESCAPE = SYMBOLS - 1  # followed by the number as it is, in ESCAPE_BITS
ESCAPE_BITS = 15
LEAST_DEVIATION, LARGEST_DEVIATION = LEAST_CLASS - 12, LARGEST_CLASS + 12  # quarter octaves of a block's own s / d
ROWS = 32  # rows of a block
LANES = 8
GROUPS = ROWS // LANES
TOGETHER = 4  # blocks that are coded at the same time
FINEST, COARSEST = 8, 24
"""The most that a block's quantisation steps may be finer or coarser than calibrated, in eighths of an octave. A block
that needs even coarser steps is unlike anything calibrated, and is not compressed."""
HEAD_WORDS = 1 + 2 * LANES
LEAST_STATE = 1 << 15
MASK = (1 << PROBABILITY_BITS) - 1
ESCAPED = 1 << (ESCAPE_BITS - 1)
POWERS = np.exp2(np.arange(-160, 160) / 4)  # powers of two, by quarter octaves: all that a byte and coarser steps need


Bits = NDArray[Any]  # bits of bf16 as uint16, or of fp32 as uint32; a segment's words as uint16


class Tables(NamedTuple):
    """The entropy coder's tables, one for each class of components, as `reprise.kernels.codecs.symbols` computes them.
    A component's class tells how much its numbers deviate, in quarter octaves of their rounding step. Frequencies of a
    class add up to 2^PROBABILITY_BITS."""

    frequencies: Words  # [classes, SYMBOLS]; 0: escaped
    starts: Words  # [classes, SYMBOLS], sums of the frequencies before
    entries: Words  # [classes, 2^PROBABILITY_BITS]: symbol, frequency << 8, distance from the start << 20
    values: Fp32  # [classes, SYMBOLS], in steps: the mean of what rounds to this symbol
    costs: Fp32
    """Mean bits of a number, [classes, deviations], when a class codes it and its deviation is LEAST_DEVIATION + i."""


class Layer(NamedTuple):
    """The calibration of a layer. K has n components, V has m numbers a row in `heads` heads.

    into [n, width]: a row of K less k_mean, multiplied by this matrix, gives its components in calibrated steps. back
    [n, width]: the components, multiplied by this matrix, give the row. width is n, rounded up to whole tiles with
    zeros. classes [n + m]: the class of each component at the calibrated step, those of K falling. v_step: the
    calibrated step of V.
    """

    k_mean: Fp32
    v_mean: Fp32
    into: Fp32
    back: Fp32
    classes: Int64
    v_step: float
    heads: int


class Scratch(NamedTuple):
    """A thread's memory for coding several blocks at the same time. Each of these blocks is called a side."""

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
