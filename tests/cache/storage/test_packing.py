"""Tests packing rows without a loss."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.storage.packing import WIDTHS, pack, unpack

GUARD = 7


def rows(width: int, count: int = 4096, seed: int = 0) -> bytes:
    """Normal numbers, as KV is: bfloat16 is the upper half of a float32."""
    numbers = np.random.default_rng(seed).standard_normal(count).astype("<f4").view("<u4")
    return (numbers >> 16).astype("<u2").tobytes() if width == 2 else numbers.tobytes()


def unpacked(packed: bytes, size: int, width: int) -> bytes | None:
    """What comes back, with the bytes before and behind it checked."""
    memory = bytearray(b"\x5a" * (size + 2 * GUARD))
    done = unpack(memoryview(packed), memoryview(memory)[GUARD : GUARD + size], width)
    assert memory[:GUARD] == memory[GUARD + size :] == b"\x5a" * GUARD
    return bytes(memory[GUARD : GUARD + size]) if done else None


@given(width=st.sampled_from(WIDTHS), data=st.binary(min_size=4, max_size=400), repeats=st.integers(1, 9))
def test_any_bytes_come_back(width, data, repeats):
    data = (data * repeats)[: len(data) * repeats // width * width]
    packed = pack(memoryview(data), width)
    assert len(packed) <= len(data)
    assert unpacked(packed, len(data), width) == data


@pytest.mark.parametrize(("width", "most"), [(2, 0.70), (4, 0.85)])
def test_rows_become_smaller(width, most):
    data = rows(width)
    packed = pack(memoryview(data), width)
    assert len(packed) < most * len(data)
    assert unpacked(packed, len(data), width) == data


def test_numbers_that_are_none_come_back_too():
    for width, specials in ((2, "<u2"), (4, "<u4")):
        top = 1 << (8 * width - 1)
        shift = {2: 7, 4: 23}[width]
        values = [0, top, 0xFF << shift, top | 0xFF << shift, (0xFF << shift) | 1, 1, top | 1, 2 ** (8 * width) - 1]
        data = np.array(values * 64, specials).tobytes()
        assert unpacked(pack(memoryview(data), width), len(data), width) == data


@given(width=st.sampled_from(WIDTHS), packed=st.binary(max_size=300), count=st.integers(1, 64))
def test_what_nobody_has_packed_is_refused_or_gives_as_much_as_is_asked_for(width, packed, count):
    found = unpacked(packed, width * count, width)
    assert found is None or len(found) == width * count


@given(width=st.sampled_from(WIDTHS), place=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_what_was_altered_is_refused_or_other_bytes_of_the_same_length(width, place, bit, cut):
    data = rows(width, 256)
    packed = bytearray(pack(memoryview(data), width))
    if cut:
        packed = packed[: place % len(packed)]
    else:
        packed[place % len(packed)] ^= 1 << bit
    found = unpacked(bytes(packed), len(data), width)
    assert found is None or len(found) == len(data)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("excess", [-1, 1, 50_000_000])
def test_exponents_for_more_or_fewer_numbers_are_refused_without_being_made(width, excess):
    count = 128
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = bytes((width - 1) * count) + coder.compress(bytes(count + excess)) + coder.flush()
    # Behind the planes it must not be shorter than a packed segment may be, nor as long as the rows.
    size = width * count
    if len(bomb) == size:
        bomb += b"\0"
    assert unpacked(bomb, size, width) is None
