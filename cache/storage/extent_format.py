"""Defines the format of a stored extent: a run of blocks of one session in one file, with a checksum per block and
layer.

    header    magic, version, length, xxh3 and MAC of the header; msgpack: fingerprint, id, session, keys, checksums
    layer 0   one segment per block: [K of 32 rows][V of 32 rows], or what a codec has made of that
    layer 1   ...

The header and every layer start at a multiple of 4 KiB, so that O_DIRECT is possible; gaps are zeros. A header
describes its extent completely, so an index can always be rebuilt from the headers. The xxh3 detects damage. The MAC,
whose key is derived from the installation's secret, detects headers written by others: write access to the directory is
not enough to pass off one block's KV as another's. Segments have only an xxh3, which detects damage but not intent.
"""

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from xxhash import xxh3_64, xxh3_64_digest

from reprise.cache.blocks.keys import typed_fields
from reprise.cache.blocks.stored import SessionRecord, StoredBlock, is_coded
from reprise.cache.storage.errors import BlockMissing

ALIGNMENT = 4096
FORMAT_VERSION = 2  # version 1 had no MAC, 4 packed its rows: their records are misses, and the next start deletes them
MAX_BLOCKS = 4096
MAX_LAYERS = 1024
MAX_SEGMENT_BYTES = 1 << 28
MAX_FINGERPRINT_BYTES = 64
MAX_HEADER_BYTES = 64 << 20
MAX_EXTENT_ID = (1 << 62) - 1
DIGEST_BYTES = 8
MAC_BYTES = 16

_MAGIC = b"REPRISEK"
# magic, version, length of the msgpack, xxh3 of the rest, MAC of everything except these two
_PREFIX = struct.Struct("<8sII8s16s")
_DIGEST_AT = _PREFIX.size - DIGEST_BYTES - MAC_BYTES
_MAC_AT = _PREFIX.size - MAC_BYTES


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """The contents of the file's first bytes. Validated on creation, and therefore also when decoded."""

    fingerprint: bytes
    extent_id: int
    session: SessionRecord
    blocks: tuple[StoredBlock, ...]
    segment_bytes: tuple[int, ...]  # bytes of one block's segment, by layer
    checksums: bytes  # xxh3_64, 8 bytes each (canonical, big-endian), layer-major

    def __post_init__(self) -> None:
        if not 0 < self.extent_id <= MAX_EXTENT_ID:
            raise ValueError(f"{self.extent_id} is not an extent id")
        if not 0 < len(self.blocks) <= MAX_BLOCKS:
            raise ValueError(f"an extent of {len(self.blocks)} blocks")
        check_segments(self.segment_bytes)
        if len(self.checksums) != DIGEST_BYTES * len(self.blocks) * len(self.segment_bytes):
            raise ValueError(f"{len(self.checksums)} bytes are not a checksum per block and layer")

    def matches(self, layer: int, block: int, data: memoryview) -> bool:
        """Return whether `data` is what was stored as this block's segment of a layer, by its checksum."""
        return checksum(data) == self._checksum(layer, block)

    def checksums_of(self, block: int) -> tuple[bytes, ...]:
        """Return the block's checksums, by layer."""
        return tuple(self._checksum(layer, block) for layer in range(len(self.segment_bytes)))

    def _checksum(self, layer: int, block: int) -> bytes:
        start = DIGEST_BYTES * (layer * len(self.blocks) + block)
        return self.checksums[start : start + DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """The bytes of one block's segment, by layer. raw: as rows. coded: as a codec has compressed it; None where there
    is no codec. Raises ValueError for impossible sizes."""

    raw: tuple[int, ...]
    coded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_segments(self.raw)
        if self.coded is not None:
            check_segments(self.coded)
            if len(self.coded) != len(self.raw):
                raise ValueError("a codec of as many layers")

    def of(self, extent: int | bytes) -> tuple[int, ...]:
        """Return the segment sizes of an extent, given its id or its name in Redis."""
        return self.coded if self.coded is not None and is_coded(extent) else self.raw


@dataclass(frozen=True, slots=True)
class ExtentForm:
    """The properties that all extents of one model share. fingerprint: names the model and the kind of its KV, in 1 to
    64 bytes. key: from `record_key`. Raises ValueError for another length of the fingerprint."""

    fingerprint: bytes
    sizes: SegmentSizes
    key: bytes

    def __post_init__(self) -> None:
        if not 0 < len(self.fingerprint) <= MAX_FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has 1 to {MAX_FINGERPRINT_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of an extent's parts in its file."""

    header_bytes: int
    segment_bytes: tuple[int, ...]
    layer_starts: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, *, header_bytes: int, segment_bytes: tuple[int, ...], num_blocks: int) -> "Layout":
        starts, end = [], header_bytes
        for size in segment_bytes:
            starts.append(end)
            end += aligned(size * num_blocks)
        return cls(header_bytes, segment_bytes, tuple(starts), end)

    def offset(self, layer: int, block: int) -> int:
        """Return the offset in bytes at which a block's segment of a layer begins. block: if it is the number of
        blocks, the result is where the layer ends."""
        return self.layer_starts[layer] + block * self.segment_bytes[layer]

    def stored_bytes(self, layer: int, blocks: Sequence[int]) -> int:
        """Return how many bytes these blocks' segments of a layer take in the file."""
        return len(blocks) * self.segment_bytes[layer]


def aligned(size: int) -> int:
    """Round up to 4 KiB."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_segments(segment_bytes: Sequence[int]) -> None:
    """Raise ValueError unless these can be the sizes of a block's segments, by layer."""
    if not 0 < len(segment_bytes) <= MAX_LAYERS:
        raise ValueError(f"{len(segment_bytes)} layers")
    if not all(0 < size <= MAX_SEGMENT_BYTES for size in segment_bytes):
        raise ValueError("a segment that is empty or too large")


def checksum(data: memoryview) -> bytes:
    """Return the xxh3_64 of `data`, 8 bytes."""
    return xxh3_64_digest(data)


def record_key(secret: bytes) -> bytes:
    """Derive, from the installation's persistent secret, the key of the MACs in extent files' headers and in rows of
    the index."""
    return blake2b(typed_fields("reprise-records"), key=blake2b(secret).digest(), digest_size=32).digest()


def encode_header(header: ExtentHeader, key: bytes) -> bytes:
    """Encode the header, padded to 4 KiB. key: from `record_key`. Raises ValueError if it is too large."""
    body = msgspec.msgpack.encode(header)
    size = aligned(_PREFIX.size + len(body))
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; the limit is {MAX_HEADER_BYTES}")
    data = bytearray(size)
    _PREFIX.pack_into(data, 0, _MAGIC, FORMAT_VERSION, len(body), bytes(DIGEST_BYTES), bytes(MAC_BYTES))
    data[_PREFIX.size : _PREFIX.size + len(body)] = body
    data[_MAC_AT : _PREFIX.size] = _header_mac(data, key)
    data[_DIGEST_AT:_MAC_AT] = _header_digest(data)
    return bytes(data)


def header_size(start: bytes) -> int:
    """Return the length of the header in bytes, from the first bytes of the file. Raises BlockMissing."""
    if len(start) < _PREFIX.size:
        raise BlockMissing("the record ends inside its header", reason="short_read")
    magic, version, length, *_ = _PREFIX.unpack_from(start)
    if magic != _MAGIC:
        raise BlockMissing("not a record of ours", reason="format")
    if version != FORMAT_VERSION:
        raise BlockMissing(f"format version {version}, not {FORMAT_VERSION}", reason="format")
    size = aligned(_PREFIX.size + length)
    if size > MAX_HEADER_BYTES:
        raise BlockMissing(f"a header of {size} bytes", reason="format")
    return size


def decode_header(data: bytes, key: bytes) -> ExtentHeader:
    """Decode a header. data: has exactly `header_size` bytes. Raises BlockMissing (short_read, format, checksum,
    forged). Nothing in the header is used before its hash and MAC are verified, and its values are still checked after
    that."""
    if len(data) != header_size(data):
        raise BlockMissing("the record ends inside its header", reason="short_read")
    _, _, length, digest, mac = _PREFIX.unpack_from(data)
    if digest != _header_digest(data):
        raise BlockMissing("the header was altered", reason="checksum")
    if not hmac.compare_digest(mac, _header_mac(data, key)):
        raise BlockMissing("the header was not written with this server's secret", reason="forged")
    try:
        return msgspec.msgpack.decode(data[_PREFIX.size : _PREFIX.size + length], type=ExtentHeader)
    except (msgspec.DecodeError, ValueError) as error:
        raise BlockMissing(f"the header is invalid: {error}", reason="format") from error


def _header_digest(data: bytes | bytearray) -> bytes:
    view = memoryview(data)
    digest = xxh3_64(view[:_DIGEST_AT])
    digest.update(view[_MAC_AT:])
    return digest.digest()


def _header_mac(data: bytes | bytearray, key: bytes) -> bytes:
    view = memoryview(data)
    mac = blake2b(view[:_DIGEST_AT], key=key, digest_size=MAC_BYTES, person=b"header")
    mac.update(view[_PREFIX.size :])
    return mac.digest()
