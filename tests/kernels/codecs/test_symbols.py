"""Tests the entropy coder's tables."""

import numpy as np
import pytest

pytest.importorskip("numba")

from reprise.kernels.codecs.symbols import classes_of, symbol_tables
from reprise.kernels.cpu.transform_format import (
    ESCAPE,
    ESCAPE_BITS,
    LARGEST_CLASS,
    LEAST_CLASS,
    LEAST_DEVIATION,
    PROBABILITY_BITS,
    REACH,
)

TABLES = symbol_tables()
CLASSES = range(LEAST_CLASS, LARGEST_CLASS + 1)


def test_frequencies_fill_every_table_and_leave_an_escape():
    assert (TABLES.frequencies.sum(1) == 1 << PROBABILITY_BITS).all()
    assert (TABLES.frequencies[:, ESCAPE] > 0).all()
    assert TABLES.frequencies.max() < 1 << PROBABILITY_BITS


def test_entries_say_what_frequencies_and_starts_say():
    slots = np.arange(1 << PROBABILITY_BITS)
    for entries, frequencies, starts in zip(TABLES.entries, TABLES.frequencies, TABLES.starts, strict=True):
        symbol = entries & 0xFF
        assert ((entries >> 8 & 0xFFF) == frequencies[symbol]).all()
        assert ((entries >> 20) == slots - starts[symbol]).all()
        assert (entries >> 20 < frequencies[symbol]).all()


def test_a_number_deviating_as_its_class_says_costs_least_there():
    own = [TABLES.costs[i, c - LEAST_DEVIATION] for i, c in enumerate(CLASSES)]
    assert own == sorted(own)
    for i, c in enumerate(CLASSES):
        assert own[i] <= TABLES.costs[:, c - LEAST_DEVIATION].min() + 0.01


@pytest.mark.parametrize("c", CLASSES)
def test_costs_are_those_of_numbers_drawn(c):
    rng = np.random.default_rng(c + 100)
    count, deviation = 200_000, 2 ** (c / 4)
    gaussian = rng.standard_normal(count)
    drawn = np.where(rng.random(count) < 0.4, gaussian, rng.laplace(0, 0.5**0.5, count)) * deviation
    symbols = np.rint(drawn).astype(int) + REACH
    symbols[(symbols < 0) | (symbols >= ESCAPE)] = ESCAPE
    frequencies = TABLES.frequencies[c - LEAST_CLASS][symbols]
    escapes = frequencies == 0
    frequencies = np.where(escapes, TABLES.frequencies[c - LEAST_CLASS][ESCAPE], frequencies)
    bits = PROBABILITY_BITS - np.log2(frequencies) + ESCAPE_BITS * (escapes | (symbols == ESCAPE))
    assert bits.mean() == pytest.approx(TABLES.costs[c - LEAST_CLASS, c - LEAST_DEVIATION], rel=0.05, abs=0.005)


def test_classes_are_quarter_octaves():
    assert classes_of(np.array([1.0, 2.0, 0.5, 0.0], np.float32), 1.0)[:3].tolist() == [0, 4, -4]
    assert classes_of(np.array([0.0], np.float32), 1.0)[0] < LEAST_CLASS
