"""Disk tiers with bytes derived from each block's key and layer, so that any read can be verified."""

import hashlib
import os
import struct

import msgspec
import pytest

from reprise.cache.blocks.stored import SessionRecord, StoredBlock
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import (
    ExtentForm,
    ExtentHeader,
    SegmentSizes,
    checksum,
    encode_header,
    header_size,
)
from reprise.cache.storage.extent_store import ExtentStore

SEGMENTS = (300, 5000, 4096)  # odd, more than a page, exactly a page
FINGERPRINT = b"a model"
RECORD_KEY = b"of an installation"
PREFIX_BYTES = 40


def make_tier(directory, *, fingerprint=FINGERPRINT, segment_bytes=SEGMENTS, key=RECORD_KEY, **changes):
    fields = {
        "form": ExtentForm(fingerprint, SegmentSizes(tuple(segment_bytes)), key),
        "capacity_bytes": 1 << 30,
        "min_free_bytes": 0,
        "read_bytes_per_s": 0.0,
        "write_bytes_per_s": 0.0,
        "deadline_s": 30.0,  # no busy machine misses it
        "owner": f"a running server (pid {os.getpid()})",
    }
    return ExtentStore(directory=directory, **{**fields, **changes})


def make_blocks(name, count=3):
    keys = [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(count + 1)]
    return [StoredBlock(keys[i + 1], keys[i], bytes(range(128)), False) for i in range(count)]


def make_session(name="s", context=b"context"):
    return SessionRecord("tenant", "", name, context, 1.5, False, None)


def segment_bytes_of(key, layer, size):
    return hashlib.shake_128(key + bytes([layer])).digest(size)


def checksums_of(blocks, segment):
    return b"".join(checksum(segment(layer, block)) for layer in range(len(SEGMENTS)) for block in range(len(blocks)))


def put(tier, name, count=3, session=None, extent_id=None):
    blocks = make_blocks(name, count)

    def segment(layer, block):
        return memoryview(segment_bytes_of(blocks[block].key, layer, SEGMENTS[layer]))

    sums, segments = checksums_of(blocks, segment), by_layer(segment, count)
    return tier.write(session or make_session(), blocks, sums, segments, extent_id=extent_id)


def by_layer(segment, count):
    """Return the blocks as `ExtentStore.write` takes them."""
    return lambda layer: [segment(layer, block) for block in range(count)]


def read_wrongly(tier, info, order=None):
    """Read all of the extent, block by block of `order`; the blocks whose bytes are not what was stored."""
    order = list(range(len(info.blocks))) if order is None else order
    wrong = []
    with tier.reader(info.extent_id) as reader:
        for layer, size in enumerate(SEGMENTS):
            outs = [bytearray(size) for _ in order]
            reader.read(layer, order, [memoryview(out) for out in outs])
            for block, out in zip(order, outs, strict=True):
                if bytes(out) != segment_bytes_of(info.blocks[block].key, layer, size):
                    wrong.append((layer, block))
    return wrong


def record_files(directory):
    return sorted(path for path in directory.glob("kv/*/*/*") if path.suffix in {".kv", ".tmp"})


def bytes_of_files(directory):
    return sum(path.stat().st_size for path in record_files(directory))


def reopened(tier, directory, **changes):
    tier.close()
    tier = make_tier(directory, **changes)
    return (tier, *tier.open())


def file_of(directory, info):
    (path,) = (path for path in record_files(directory) if path.stem == f"{info.extent_id:016x}")
    return path


def reason_of(tier, info):
    with pytest.raises(BlockMissing) as caught:
        assert read_wrongly(tier, info) == []
    assert caught.value.extent_id == info.extent_id
    return caught.value.reason


def forge(path, change):
    """Rewrite a record's header as somebody can who may write to the directory and does not know its key: everything
    in it is as `change` returns it, and every hash without a key is right."""
    data = path.read_bytes()
    size = header_size(data)
    body = struct.unpack_from("<I", data, 12)[0]
    header = msgspec.msgpack.decode(data[PREFIX_BYTES : PREFIX_BYTES + body], type=ExtentHeader)
    path.write_bytes(encode_header(change(header), b"a guess") + data[size:])


def all_the_rest(count):
    return 99
