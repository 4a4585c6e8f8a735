import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.stored import MAX_CONTEXT_BYTES, SessionRecord, StoredBlock
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import (
    ALIGNMENT,
    FORMAT_VERSION,
    ExtentHeader,
    Layout,
    decode_header,
    encode_header,
    header_size,
)

KEY = b"of an installation"
KEYS = st.binary(min_size=16, max_size=16)
BLOCKS = st.builds(
    StoredBlock,
    KEYS,
    KEYS,
    st.integers(1, 32).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n)),
    st.booleans(),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TIMES = st.floats(allow_nan=False, allow_infinity=False)
SESSIONS = st.builds(
    SessionRecord, NAMES, NAMES, NAMES, st.binary(max_size=9000), TIMES, st.booleans(), st.none() | TIMES
)


@st.composite
def headers(draw):
    blocks = tuple(draw(st.lists(BLOCKS, min_size=1, max_size=5)))
    segments = tuple(draw(st.lists(st.integers(1, 1 << 28), min_size=1, max_size=4)))
    size = 8 * len(blocks) * len(segments)
    checksums = draw(st.binary(min_size=size, max_size=size))
    fingerprint = draw(st.binary(min_size=1, max_size=64))
    return ExtentHeader(fingerprint, draw(st.integers(1, (1 << 62) - 1)), draw(SESSIONS), blocks, segments, checksums)


def small_header():
    block = StoredBlock(b"k" * 16, b"p" * 16, bytes(8), True)
    session = SessionRecord("tenant", "salt", "session", b"context", 12.5, False, 60.0)
    return ExtentHeader(b"model", 7, session, (block,), (100, 200), bytes(range(16)))


@given(header=headers())
def test_a_header_comes_back_as_it_was(header):
    data = encode_header(header, KEY)
    assert len(data) % ALIGNMENT == 0
    assert header_size(data[:64]) == len(data)
    assert decode_header(data, KEY) == header


@given(header=headers(), filler=st.integers(0, 255))
def test_the_length_does_not_depend_on_the_checksums(header, filler):
    other = replace(header, checksums=bytes([filler]) * len(header.checksums))
    assert len(encode_header(other, KEY)) == len(encode_header(header, KEY))


def test_every_flipped_bit_of_a_header_is_seen():
    data = encode_header(small_header(), KEY)
    for position in range(len(data)):
        for bit in (1, 128):
            spoilt = bytearray(data)
            spoilt[position] ^= bit
            with pytest.raises(BlockMissing) as caught:
                decode_header(bytes(spoilt), KEY)
            if position < 12:
                assert caught.value.reason == "format"  # magic and version
            elif position >= 16:
                assert caught.value.reason == "checksum"
            else:
                assert caught.value.reason in {"format", "short_read", "checksum"}  # the length


def test_a_header_of_any_other_length_is_refused():
    data = encode_header(small_header(), KEY)
    for length in range(len(data)):
        with pytest.raises(BlockMissing) as caught:
            decode_header(data[:length], KEY)
        assert caught.value.reason == "short_read"
    with pytest.raises(BlockMissing):
        decode_header(data + bytes(ALIGNMENT), KEY)


def test_a_length_is_not_believed_before_it_is_checked():
    with pytest.raises(BlockMissing) as caught:
        header_size(struct.pack("<8sII8s16s", b"REPRISEK", FORMAT_VERSION, (1 << 32) - 1, bytes(8), bytes(16)))
    assert caught.value.reason == "format"


@given(sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=5), num_blocks=st.integers(1, 9))
def test_layers_are_aligned_and_segments_do_not_overlap(sizes, num_blocks):
    layout = Layout.of(header_bytes=ALIGNMENT, segment_bytes=tuple(sizes), num_blocks=num_blocks)
    end = layout.header_bytes
    for layer, size in enumerate(sizes):
        assert layout.offset(layer, 0) % ALIGNMENT == 0
        for block in range(num_blocks):
            assert layout.offset(layer, block) >= end
            end = layout.offset(layer, block) + size
    assert end <= layout.size_bytes < end + ALIGNMENT


@pytest.mark.parametrize(
    "make",
    [
        lambda: StoredBlock(b"short", b"p" * 16, bytes(4), False),
        lambda: StoredBlock(b"k" * 16, b"p" * 16, bytes(5), False),
        lambda: StoredBlock(b"k" * 16, b"p" * 16, b"", True),
        lambda: StoredBlock(b"k" * 16, b"p" * 16, bytes(4 * 33), False),
        lambda: SessionRecord("t", "s", "i", bytes(MAX_CONTEXT_BYTES + 1), 0.0, False, None),
        lambda: SessionRecord("t", "s", "i", b"", float("nan"), False, None),
        lambda: SessionRecord("t", "s", "i" * (65 << 10), b"", 0.0, False, None),
        lambda: replace(small_header(), blocks=()),
        lambda: replace(small_header(), segment_bytes=(100,)),
        lambda: replace(small_header(), segment_bytes=(0, 200)),
        lambda: replace(small_header(), extent_id=0),
    ],
)
def test_what_no_record_can_hold_is_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()
