"""Tests extents whose segments are packed: they are read by what their header says, whatever the setting is now, and
nothing in them is believed."""

import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import (
    FORMAT_VERSION,
    PACKED_VERSION,
    ExtentHeader,
    PackedHeader,
    checksum,
    decode_header,
    encode_header,
    header_size,
)
from reprise.cache.storage.extent_reader import ExtentReader
from tests.cache.storage.disk_helpers import (
    RECORD_KEY,
    SEGMENTS,
    by_layer,
    checksums_of,
    file_of,
    make_blocks,
    make_session,
    make_tier,
    reopened,
)

BLOCKS = 5


def rows_of(key: bytes, layer: int, size: int) -> bytes:
    """Numbers in bfloat16 that follow from the block's key."""
    seed = int.from_bytes(key[:6], "little") + layer
    numbers = np.random.default_rng(seed).standard_normal(size // 2).astype("<f4").view("<u4")
    return (numbers >> 16).astype("<u2").tobytes()


def put(tier, name="a", count=BLOCKS):
    blocks = make_blocks(name, count)

    def segment(layer, block):
        return memoryview(rows_of(blocks[block].key, layer, SEGMENTS[layer]))

    return tier.write(make_session(name), blocks, checksums_of(blocks, segment), by_layer(segment, count))


def landed(reader: ExtentReader, layer: int, places: list[int]) -> list[bytes]:
    """Blocks of one layer as a load has them, before it compares their checksums."""
    size = SEGMENTS[layer]
    out = memoryview(bytearray(size * len(places)))
    assert reader.land(layer, [(reader, places)], [out], lambda _: 1) == 1
    return [bytes(out[start : start + size]) for start in range(0, len(out), size)]


def is_right(tier, info) -> bool:
    """Reads it in every way."""
    places = list(range(len(info.blocks)))
    with tier.reader(info.extent_id) as reader:
        for layer, size in enumerate(SEGMENTS):
            wanted = [rows_of(block.key, layer, size) for block in info.blocks]
            for order in (places, places[::-1], places[1:3], places[::2]):
                outs = [bytearray(size) for _ in order]
                reader.read(layer, order, [memoryview(out) for out in outs])
                assert list(map(bytes, outs)) == landed(reader, layer, order) == [wanted[place] for place in order]
        whole = [memoryview(bytearray(size * len(places))) for size in SEGMENTS]
        assert reader.land(0, [(reader, places)], whole, lambda _: len(SEGMENTS)) == len(SEGMENTS)
        for layer, (size, out) in enumerate(zip(SEGMENTS, whole, strict=True)):
            assert bytes(out) == b"".join(rows_of(block.key, layer, size) for block in info.blocks)
        assert type(reader.header) is ExtentHeader
        assert reader.header.segment_bytes == SEGMENTS
    return True


def version_of(path) -> int:
    return struct.unpack_from("<I", path.read_bytes(), 8)[0]


def test_each_extent_is_read_as_its_header_says_over_restarts(tmp_path):
    tier = make_tier(tmp_path)
    tier.open()
    raw = put(tier, "raw")
    tier, extents, _ = reopened(tier, tmp_path, packed_width=2)
    packed = put(tier, "packed")
    assert [info.extent_id for info in extents] == [raw.extent_id]
    assert is_right(tier, raw)
    assert is_right(tier, packed)
    tier, extents, _ = reopened(tier, tmp_path)
    assert {info.extent_id: info.size_bytes for info in extents} == {
        info.extent_id: file_of(tmp_path, info).stat().st_size for info in (raw, packed)
    }
    later = put(tier, "later")
    for info, version in ((raw, FORMAT_VERSION), (packed, PACKED_VERSION), (later, FORMAT_VERSION)):
        assert is_right(tier, info)
        assert version_of(file_of(tmp_path, info)) == version
    assert all(problem is None for _, problem in tier.verify())
    assert packed.size_bytes < 0.8 * raw.size_bytes
    tier.close()


def test_an_index_that_is_lost_is_made_again_of_packed_headers_too(tmp_path):
    tier = make_tier(tmp_path, packed_width=2)
    tier.open()
    info = put(tier)
    tier.close()
    for file in tmp_path.rglob("index.sqlite*"):
        file.unlink()
    tier = make_tier(tmp_path)
    extents, _ = tier.open()
    assert [(found.extent_id, found.size_bytes) for found in extents] == [(info.extent_id, info.size_bytes)]
    assert is_right(tier, info)
    tier.close()


def test_a_cap_counts_the_bytes_that_come_off_the_disk(tmp_path, monkeypatch):
    tier = make_tier(tmp_path, packed_width=2)
    tier.open()
    info = put(tier)
    booked = []
    throttle = tier._opener._throttle
    monkeypatch.setattr(type(throttle), "is_capped", property(lambda _: True))
    monkeypatch.setattr(type(throttle), "book", lambda _, size: booked.append(size) or 0.0)
    with tier.reader(info.extent_id) as reader:
        landed(reader, 1, [0, 1])
        reader.read(1, [0, 1], [memoryview(bytearray(SEGMENTS[1])) for _ in range(2)])
    assert booked[0] == booked[1] < 0.75 * 2 * SEGMENTS[1]
    tier.close()


def test_a_flipped_bit_costs_its_block_alone(tmp_path):
    tier = make_tier(tmp_path, packed_width=2)
    tier.open()
    info = put(tier)
    path = file_of(tmp_path, info)
    data = path.read_bytes()
    start = header_size(data)
    lost = 0
    for place in range(start, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with tier.reader(info.extent_id) as reader:
            header = reader.header
            for layer in range(len(SEGMENTS)):
                found = landed(reader, layer, list(range(BLOCKS)))
                bad = [b for b, rows in enumerate(found) if not header.matches(layer, b, memoryview(rows))]
                assert len(bad) <= 1
                for block in bad:
                    lost += 1
                    with pytest.raises(BlockMissing) as caught:
                        reader.read(layer, [block], [memoryview(bytearray(SEGMENTS[layer]))])
                    assert (caught.value.reason, caught.value.block) == ("checksum", block)
    assert lost > 50
    tier.close()


def test_a_file_that_was_cut_off_is_missing(tmp_path):
    tier = make_tier(tmp_path, packed_width=2)
    tier.open()
    info = put(tier)
    path = file_of(tmp_path, info)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(BlockMissing) as caught:
        tier.reader(info.extent_id)
    assert caught.value.reason == "short_read"
    tier.close()


def header(**changes) -> PackedHeader:
    blocks = tuple(make_blocks("h", 2))
    fields = {
        "fingerprint": b"f",
        "extent_id": 7,
        "session": make_session(),
        "blocks": blocks,
        "segment_bytes": SEGMENTS,
        "checksums": checksum(memoryview(b"")) * len(SEGMENTS) * 2,
        "width": 2,
        "lengths": np.array([200, 300, 4000, 1, 4096, 17], "<u4").tobytes(),
    }
    return PackedHeader(**{**fields, **changes})


def test_a_packed_header_comes_back_as_it_was():
    encoded = encode_header(header(), RECORD_KEY)
    assert decode_header(encoded, RECORD_KEY) == header()
    assert header().plain == ExtentHeader(**{name: getattr(header(), name) for name in ExtentHeader.__slots__})


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": b""},
        {"lengths": np.array([200, 300, 4000, 1, 4096], "<u4").tobytes()},
        {"lengths": np.array([200, 300, 4000, 0, 4096, 17], "<u4").tobytes()},
        {"lengths": np.array([301, 300, 4000, 1, 4096, 17], "<u4").tobytes()},
        {"lengths": np.array([200, 300, 4000, 1, 2**32 - 1, 17], "<u4").tobytes()},
        {"width": 0},
        {"width": 3},
        {"segment_bytes": (301, 5000, 4096)},
    ],
)
def test_lengths_that_cannot_be_are_refused_before_anything_is_made_of_them(changes):
    with pytest.raises(ValueError, match=r"segment|length"):
        header(**changes)


@settings(max_examples=200)
@given(data=st.data())
def test_headers_of_any_contents_are_refused_or_within_bounds(data):
    """As somebody would write them who knows the key."""
    good = header()
    lengths = data.draw(st.binary(max_size=40) | st.binary(min_size=24, max_size=24))
    width = data.draw(st.integers(-1, 9))
    body = msgspec.msgpack.encode({**msgspec.to_builtins(replace(good)), "width": width, "lengths": lengths})
    try:
        found = msgspec.msgpack.decode(body, type=PackedHeader)
    except (msgspec.DecodeError, ValueError):
        return
    sizes = [found.lengths_of(layer) for layer in range(len(SEGMENTS))]
    assert all(0 < length <= size for size, layer in zip(SEGMENTS, sizes, strict=True) for length in layer)
