"""One extent as a file: written all or nothing, read with every byte checked. The blocking calls of the disk tier; they
run in its I/O threads."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cache.extent import (
    ALIGNMENT,
    DIGEST_BYTES,
    ExtentHeader,
    Layout,
    checksum,
    decode_header,
    encode_header,
    header_size,
)
from cache.tiers.base import BlockMissing
from cache.tiers.io_threads import Beat

CHUNK_BYTES = 4 << 20  # of one read or write call, so that a deadline is about a device and not about an extent's size
SYNC_BYTES = 64 << 20  # what one fdatasync may have to write
IOV_MAX = 1024

Stamp = tuple[int, int, int]
"""(inode, size, mtime in ns): the same as when its header was parsed, or another file."""


@dataclass(frozen=True, slots=True)
class ParsedExtent:
    """A header that was checked, and the file it was read from."""

    header: ExtentHeader
    layout: Layout
    stamp: Stamp


def write_extent(
    *, path: Path, header: ExtentHeader, layout: Layout, segments: Sequence[Sequence[memoryview]], beat: Beat
) -> None:
    """Write segments[layer][block] under a temporary name, make it durable, then give it its name. Whatever fails, no
    file stays behind. The checksums in `header` are filled in here. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            checksums = _write_layers(fd, layout, segments, beat)
            _write_all(fd, [memoryview(encode_header(replace(header, checksums=checksums)))], 0)
            os.ftruncate(fd, layout.size_bytes)
            beat()
            os.fdatasync(fd)
        finally:
            os.close(fd)
        beat()
        os.rename(temporary, path)
        beat()
        sync_directory(path.parent)
    except BaseException:
        remove_extent(path)
        raise


def remove_extent(path: Path) -> None:
    """The file and what a write left of it. Forgives what is not there; raises OSError."""
    for name in (path.with_suffix(".tmp"), path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def sync_directory(path: Path) -> None:
    """Names in it survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_extent(
    path: Path, *, fingerprint: bytes, segment_bytes: tuple[int, ...], extent_id: int, known: ParsedExtent | None
) -> tuple[int, ParsedExtent]:
    """A descriptor and the checked header; `known` saves parsing it again. Raises BlockMissing."""
    try:
        # Not blocking: a FIFO in the way would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise BlockMissing(f"extent {extent_id:016x} is gone", reason="missing") from error
    except OSError as error:
        raise BlockMissing(f"extent {extent_id:016x} cannot be opened: {error}", reason="io") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BlockMissing(f"extent {extent_id:016x} is not a file", reason="format")
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if known is not None and known.stamp == stamp:
            return fd, known
        return fd, _parse(fd, stamp, fingerprint, segment_bytes, extent_id)
    except OSError as error:
        os.close(fd)
        raise BlockMissing(f"extent {extent_id:016x} cannot be read: {error}", reason="io") from error
    except BaseException:
        os.close(fd)
        raise


def read_segments(fd: int, extent: ParsedExtent, layer: int, blocks: Sequence[int], buffer: memoryview) -> None:
    """Fill `buffer` with the segments, one behind the other, and check each. One call per run of consecutive blocks.
    Raises BlockMissing."""
    size = extent.layout.segment_bytes[layer]
    for start, stop in runs(blocks):
        part = buffer[start * size : stop * size]
        try:
            got = _read_all(fd, part, extent.layout.offset(layer, blocks[start]))
        except OSError as error:
            raise BlockMissing(f"extent {extent.header.extent_id:016x}: {error}", reason="io") from error
        if got != len(part):
            raise BlockMissing(f"extent {extent.header.extent_id:016x} was cut off", reason="short_read")
    for i, block in enumerate(blocks):
        if not extent.header.matches(layer, block, buffer[i * size : (i + 1) * size]):
            where = f"layer {layer}, block {block} of extent {extent.header.extent_id:016x}"
            raise BlockMissing(f"{where} was altered", reason="checksum")


def read_header(fd: int, file_bytes: int) -> tuple[ExtentHeader, int]:
    """The header of whichever model's record this is, and its length. Raises BlockMissing, OSError."""
    start = bytearray(ALIGNMENT)
    got = _read_all(fd, memoryview(start), 0)
    size = header_size(bytes(start[:got]))
    if size > file_bytes:
        raise BlockMissing("the record ends inside its header", reason="short_read")
    data = bytearray(size)
    got = _read_all(fd, memoryview(data), 0)
    return decode_header(bytes(data[:got])), size


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of places in `blocks` that hold consecutive numbers."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield start, i
            start = i


def _parse(fd: int, stamp: Stamp, fingerprint: bytes, segment_bytes: tuple[int, ...], extent_id: int) -> ParsedExtent:
    header, size = read_header(fd, stamp[1])
    if header.fingerprint != fingerprint:
        raise BlockMissing(f"extent {extent_id:016x} is another model's", reason="fingerprint")
    if header.segment_bytes != segment_bytes or header.extent_id != extent_id:
        raise BlockMissing(f"extent {extent_id:016x} has another layout or id", reason="format")
    layout = Layout.of(header_bytes=size, segment_bytes=segment_bytes, num_blocks=len(header.blocks))
    if stamp[1] != layout.size_bytes:
        cut = stamp[1] < layout.size_bytes
        raise BlockMissing(f"extent {extent_id:016x} has a wrong size", reason="short_read" if cut else "format")
    return ParsedExtent(header, layout, stamp)


def _write_layers(fd: int, layout: Layout, segments: Sequence[Sequence[memoryview]], beat: Beat) -> bytes:
    checksums = bytearray()
    unsynced = 0
    for layer, views in enumerate(segments):
        size = layout.segment_bytes[layer]
        step = max(1, min(IOV_MAX, CHUNK_BYTES // size))
        for block in range(0, len(views), step):
            chunk = views[block : block + step]
            checksums += b"".join(map(checksum, chunk))  # just before they are copied: they are in the CPU's cache then
            _write_all(fd, list(chunk), layout.offset(layer, block))
            unsynced += size * len(chunk)
            beat()
            if unsynced >= SYNC_BYTES:
                os.fdatasync(fd)
                unsynced = 0
                beat()
    assert len(checksums) == DIGEST_BYTES * len(segments) * len(segments[0])
    return bytes(checksums)


def _write_all(fd: int, views: list[memoryview], offset: int) -> None:
    while views:
        written = _pwritev(fd, views, offset)
        if written == 0:
            raise OSError("the device takes no more bytes")
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _read_all(fd: int, out: memoryview, offset: int) -> int:
    got = 0
    while got < len(out):
        count = _preadv(fd, out[got:], offset + got)
        if count == 0:
            break
        got += count
    return got


def _pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, views, offset)
    return os.pwrite(fd, b"".join(views), offset)


def _preadv(fd: int, out: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], offset)
    data = os.pread(fd, len(out), offset)
    out[: len(data)] = data
    return len(data)
