"""Computes the tables of the entropy coder: how likely each rounded number is, given the deviation of the numbers
before rounding.

A component with deviation s that is rounded in steps of d gives whole numbers whose distribution depends on s / d. So a
small set of tables, one for each quarter octave of s / d, serves every component of every layer, and a step that is a
quarter octave coarser takes the next table. The components lie between a Gaussian and a Laplacian; the tables are for a
mixture (on SmolLM2 any mixture costs within 1 % of the best).
"""

from math import erf, exp, sqrt

import numpy as np
from numpy.typing import NDArray

from reprise.kernels.cpu.transform_format import (
    ESCAPE,
    ESCAPE_BITS,
    LARGEST_CLASS,
    LARGEST_DEVIATION,
    LEAST_CLASS,
    LEAST_DEVIATION,
    PROBABILITY_BITS,
    REACH,
    SYMBOLS,
    Tables,
)
from reprise.kernels.views import Int64

Fp64 = NDArray[np.float64]

_GAUSSIAN = 0.4
_TOTAL = 1 << PROBABILITY_BITS


def symbol_tables() -> Tables:
    """Return the tables of the entropy coder. They are the same on all machines that round sums of doubles alike, so
    that a block can be decoded on another machine."""
    classes = range(LEAST_CLASS, LARGEST_CLASS + 1)
    frequencies = np.stack([_frequencies(2 ** (c / 4)) for c in classes])
    starts = np.concatenate([np.zeros((len(classes), 1), np.int64), frequencies.cumsum(1)[:, :-1]], 1)
    slots = np.arange(_TOTAL)
    entries = []
    for frequency, start in zip(frequencies, starts, strict=True):
        symbol = np.searchsorted(frequency.cumsum(), slots, side="right")
        entries.append(symbol | frequency[symbol] << 8 | (slots - start[symbol]) << 20)
    with np.errstate(divide="ignore"):
        bits = PROBABILITY_BITS - np.log2(frequencies)
    bits = np.where(frequencies > 0, bits, bits[:, ESCAPE:] + ESCAPE_BITS)
    bits[:, ESCAPE] += ESCAPE_BITS
    shares = np.stack([_shares(2 ** (d / 4)) for d in range(LEAST_DEVIATION, LARGEST_DEVIATION + 1)])
    values = np.stack([_values(2 ** (c / 4)) for c in classes])
    return Tables(
        frequencies.astype(np.uint32),
        starts.astype(np.uint32),
        np.stack(entries).astype(np.uint32),
        values.astype(np.float32),
        (bits @ shares.T).astype(np.float32),
    )


def classes_of(deviations: Fp64, step: float) -> Int64:
    """Return the class of each component, which tells how much its numbers vary: the quarter octaves of deviation /
    step. The entropy coder has a table for each of some classes from LEAST_CLASS on; the result may lie outside of
    these."""
    return np.round(4 * np.log2(np.maximum(deviations, 1e-30) / step)).astype(np.int64)


def _below(x: float) -> float:
    """Return the probability that a number is less than x. Numbers are taken to be distributed as a mixture of a
    Gaussian and a Laplacian with a standard deviation of 1."""
    gaussian = 0.5 * (1 + erf(x / sqrt(2)))
    laplacian = 0.5 * exp(sqrt(2) * x) if x < 0 else 1 - 0.5 * exp(-sqrt(2) * x)
    return _GAUSSIAN * gaussian + (1 - _GAUSSIAN) * laplacian


def _shares(deviation: float) -> Fp64:
    """Return the probability of each symbol from -REACH to REACH (a number that is rounded to it), and last that of a
    number beyond these. deviation: the numbers' standard deviation, in rounding steps."""
    edges = [(symbol - 0.5) / deviation for symbol in range(-REACH, REACH + 2)]
    shares = np.diff([_below(edge) for edge in edges])
    return np.append(shares, max(0.0, 1 - shares.sum()))


def _frequencies(deviation: float) -> Int64:
    """Return the symbols' probabilities as whole numbers that add up to 2^PROBABILITY_BITS; 0 for symbols that are
    escaped. deviation: the numbers' standard deviation, in rounding steps."""
    share = _shares(deviation)
    # Symbols rarer than one in 2^PROBABILITY_BITS are escaped, except 0 and its neighbours.
    kept = share * _TOTAL >= 0.5
    kept[REACH - 1 : REACH + 2] = kept[ESCAPE] = True
    frequency = np.where(kept, np.maximum(1, np.floor(share * (_TOTAL - kept.sum()))), 0).astype(np.int64)
    frequency[REACH] += _TOTAL - frequency.sum()  # a symbol's share is below one, so it stays below 2^12
    return frequency


def _values(deviation: float) -> Fp64:
    """Return for each symbol the number that decoding gives for it: the mean of those that are rounded to it, in
    rounding steps. deviation: the numbers' standard deviation, in rounding steps."""
    means = np.zeros(SYMBOLS)
    inside = (np.arange(64) + 0.5) / 64 - 0.5
    for symbol in range(1, REACH + 1):
        points = (symbol + inside) / deviation
        gaussian = np.exp(-(points**2) / 2) / sqrt(2 * np.pi)
        laplacian = np.exp(-sqrt(2) * points) / sqrt(2)
        weight = _GAUSSIAN * gaussian + (1 - _GAUSSIAN) * laplacian + 1e-300
        mean = symbol + (inside * weight).sum() / weight.sum()
        means[REACH + symbol], means[REACH - symbol] = mean, -mean
    return means
