"""Writes one extent to a file, all or nothing, and reads it with every byte checked. These calls block, so the I/O
threads of the disk tier run them."""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path

from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import (
    ALIGNMENT,
    ExtentHeader,
    Layout,
    aligned,
    decode_header,
    header_size,
)
from reprise.cache.storage.io_threads import Beat

CHUNK_BYTES = 4 << 20  # most per read or write call, so that a deadline measures the device, not the extent's size
SYNC_BYTES = 64 << 20  # the most that one fdatasync may have to write
_MAX_PIECES = 512  # buffers in one write call
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

Stamp = tuple[int, int, int]
"""(inode, size, mtime in ns) of a file. If they differ, it is not the file whose header was parsed."""


@dataclass(frozen=True, slots=True)
class ParsedExtent:
    """A verified header, and the file from which it was read."""

    header: ExtentHeader
    layout: Layout
    stamp: Stamp


def write_extent(
    *,
    path: str,
    header: bytes,
    layout: Layout,
    segments: Sequence[Sequence[memoryview]],
    buffer: mmap.mmap,
    beat: Beat,
) -> None:
    """Write the encoded header and segments[layer][block] to a temporary file, make it durable, then rename it. If
    anything fails, no file is left. buffer: at least CHUNK_BYTES of scratch memory. beat: called between the steps, so
    that a deadline applies to each. Raises OSError."""
    try:
        with _shard(path) as (shard, name):
            temporary = temporary_of(name)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=shard)
            try:
                # Bypass the page cache, since what is written is still in DRAM. 7.5 MB then take 1.2 ms of CPU instead
                # of 3.3, or 20 where the cache has to grow for them.
                _set_direct(fd, True)
                _write_parts(fd, _parts(header, layout, segments), memoryview(buffer)[:CHUNK_BYTES], beat)
                beat()
                os.fdatasync(fd)
            finally:
                os.close(fd)
            beat()
            os.rename(temporary, name, src_dir_fd=shard, dst_dir_fd=shard)
            beat()
            os.fsync(shard)
    except BaseException:
        remove_extent(path)
        raise


def temporary_of(path: str) -> str:
    """Return the name of an extent's file while it is written. Avoids pathlib, whose cost every turn would pay."""
    return f"{os.path.splitext(path)[0]}.tmp"


def remove_extent(path: str) -> None:
    """Delete the file and its temporary file, if an unfinished write left one. A missing file is ignored. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError), _shard(path) as (shard, name):
        for each in (temporary_of(name), name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each, dir_fd=shard)


@contextlib.contextmanager
def _shard(path: str) -> Iterator[tuple[int, str]]:
    """Open the directory of a file; yields a descriptor and the file's name in it. Does not follow a link in the
    directory's place, because its target is not ours to write or delete. Raises OSError."""
    directory, name = os.path.split(path)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd, name
    finally:
        os.close(fd)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_extent(
    path: str,
    *,
    fingerprint: bytes,
    segment_bytes: tuple[int, ...],
    key: bytes,
    extent_id: int,
    known: ParsedExtent | None,
) -> tuple[int, ParsedExtent]:
    """Open an extent and verify its header, unless `known` is still the same file. Returns the descriptor and the
    parsed extent. key: from `reprise.cache.storage.extent_format.record_key`. Raises BlockMissing."""
    try:
        with _shard(path) as (shard, name):
            # Non-blocking: opening a FIFO in the file's place would wait for a writer for ever.
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=shard)
    except FileNotFoundError as error:
        raise BlockMissing(f"extent {extent_id:016x} is gone", reason="missing") from error
    except OSError as error:
        raise BlockMissing(f"extent {extent_id:016x} cannot be opened: {error}", reason="io") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BlockMissing(f"extent {extent_id:016x} is not a file", reason="format")
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if known is None or known.stamp != stamp:
            known = _parse(fd, stamp, fingerprint, segment_bytes, key, extent_id)
        if not any(size % ALIGNMENT for size in segment_bytes):
            # Bypass the page cache, since what is read will lie in HBM or DRAM. 19 MB then take 2 ms of CPU instead of
            # 8, or 50 where the cache has to grow for them.
            _set_direct(fd, True)
        return fd, known
    except OSError as error:
        os.close(fd)
        raise BlockMissing(f"extent {extent_id:016x} cannot be read: {error}", reason="io") from error
    except BaseException:
        os.close(fd)
        raise


def io_buffer(size: int) -> mmap.mmap:
    """Allocate memory that direct I/O can use."""
    buffer = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no large pages
            buffer.madvise(mmap.MADV_HUGEPAGE)  # the device gets few long pieces instead of many short ones
    return buffer


def read_segments(fd: int, extent: ParsedExtent, layer: int, blocks: Sequence[int], buffer: memoryview) -> None:
    """Fill `buffer` with the segments of `blocks` in one layer, back to back, with one read per run of consecutive
    blocks. Raises BlockMissing."""
    size = extent.layout.segment_bytes[layer]
    for start, stop in runs(blocks):
        _read(fd, extent, [buffer[start * size : stop * size]], extent.layout.offset(layer, blocks[start]))


def read_layers(fd: int, extent: ParsedExtent, first_layer: int, buffers: Sequence[memoryview]) -> None:
    """Fill each of `buffers` with all segments of one layer, beginning with `first_layer`, in one read if no gaps
    separate the layers. Raises BlockMissing."""
    layout = extent.layout
    layers = range(first_layer, first_layer + len(buffers))
    ends = [layout.layer_starts[layer] + len(buffer) for layer, buffer in zip(layers, buffers, strict=True)]
    begin = 0
    for stop in range(1, len(buffers) + 1):
        if stop == len(buffers) or layout.layer_starts[layers[stop]] != ends[stop - 1]:
            _read(fd, extent, buffers[begin:stop], layout.layer_starts[layers[begin]])
            begin = stop


def _read(fd: int, extent: ParsedExtent, parts: Sequence[memoryview], offset: int) -> None:
    extent_id = extent.header.extent_id
    try:
        got = _read_all(fd, parts, offset)
    except OSError as error:
        raise BlockMissing(f"extent {extent_id:016x}: {error}", reason="io", extent_id=extent_id) from error
    if got != sum(map(len, parts)):
        raise BlockMissing(f"extent {extent_id:016x} was cut off", reason="short_read", extent_id=extent_id)


def check_segments(extent: ParsedExtent, layer: int, blocks: Sequence[int], buffer: memoryview) -> None:
    """Raise BlockMissing for the first segment that differs from what was stored."""
    size = extent.layout.segment_bytes[layer]
    for i, block in enumerate(blocks):
        if not extent.header.matches(layer, block, buffer[i * size : (i + 1) * size]):
            raise altered(extent, layer, block)


def altered(extent: ParsedExtent, layer: int, block: int) -> BlockMissing:
    extent_id = extent.header.extent_id
    where = f"layer {layer}, block {block} of extent {extent_id:016x}"
    return BlockMissing(f"{where} was altered", reason="checksum", extent_id=extent_id, block=block)


def read_header(fd: int, file_bytes: int, key: bytes) -> tuple[ExtentHeader, int]:
    """Read the header of an extent file of any model. Returns the header and its length in bytes. Raises BlockMissing,
    OSError."""
    start = bytearray(ALIGNMENT)
    got = _read_all(fd, [memoryview(start)], 0)
    size = header_size(bytes(start[:got]))
    if size > file_bytes:
        raise BlockMissing("the record ends inside its header", reason="short_read")
    data = bytearray(size)
    got = _read_all(fd, [memoryview(data)], 0)
    return decode_header(bytes(data[:got]), key), size


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of indices into `blocks` that hold consecutive numbers."""
    if blocks and list(blocks) == list(range(blocks[0], blocks[0] + len(blocks))):
        yield 0, len(blocks)  # the usual case, without looking at each block
        return
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield start, i
            start = i


def _parse(
    fd: int, stamp: Stamp, fingerprint: bytes, segment_bytes: tuple[int, ...], key: bytes, extent_id: int
) -> ParsedExtent:
    header, size = read_header(fd, stamp[1], key)
    if header.fingerprint != fingerprint:
        raise BlockMissing(f"extent {extent_id:016x} is another model's", reason="fingerprint")
    if header.segment_bytes != segment_bytes or header.extent_id != extent_id:
        raise BlockMissing(f"extent {extent_id:016x} has another layout or id", reason="format")
    layout = Layout.of(header_bytes=size, segment_bytes=header.segment_bytes, num_blocks=len(header.blocks))
    if stamp[1] != layout.size_bytes:
        cut = stamp[1] < layout.size_bytes
        raise BlockMissing(f"extent {extent_id:016x} has a wrong size", reason="short_read" if cut else "format")
    return ParsedExtent(header, layout, stamp)


def _parts(header: bytes, layout: Layout, segments: Sequence[Sequence[memoryview]]) -> Iterator[memoryview]:
    """Yield all bytes of the file in order."""
    yield memoryview(header)
    for views in segments:
        yield from views
        size = sum(map(len, views))
        if padding := aligned(size) - size:
            yield memoryview(bytes(padding))


def _write_parts(fd: int, parts: Iterable[memoryview], buffer: memoryview, beat: Beat) -> None:
    """Write the parts back to back from the start of the file. Parts aligned for direct I/O are written from where they
    are, others through the buffer."""
    pieces: list[memoryview] = []
    offset = filled = unsynced = 0
    for part in parts:
        fits = len(part) % ALIGNMENT == 0 and _is_aligned(part)
        while len(part):
            taken = min(len(part), len(buffer) - filled)
            piece, part = (part, part[:0]) if taken == len(part) else (part[:taken], part[taken:])
            if not fits or filled % ALIGNMENT:
                copied = buffer[filled : filled + taken]
                copied[:] = piece
                piece = copied
            pieces.append(piece)
            filled += taken
            if filled < len(buffer) and len(pieces) < _MAX_PIECES:
                continue
            _write_all(fd, pieces, offset)
            offset, unsynced, filled, pieces = offset + filled, unsynced + filled, 0, []
            beat()
            if unsynced >= SYNC_BYTES:
                os.fdatasync(fd)
                unsynced = 0
                beat()
    _write_all(fd, pieces, offset)


def _is_aligned(view: memoryview) -> bool:
    """Return whether direct I/O can use this memory. Read-only memory is a header, which is never aligned."""
    return len(view) > 0 and not view.readonly and addressof(c_char.from_buffer(view)) % ALIGNMENT == 0


def _write_all(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    left = list(pieces)
    while left:
        try:
            written = _pwritev(fd, left, offset)
        except OSError as error:
            # EINVAL: the device has larger blocks, or this is the rest of a short write, which may begin anywhere.
            if error.errno != errno.EINVAL or not _set_direct(fd, False):
                raise
            continue
        if written == 0:
            raise OSError("the device takes no more bytes")
        offset += written
        _drop_front(left, written)


def _drop_front(parts: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes, which have been read or written, from `parts`."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]


def _set_direct(fd: int, direct: bool) -> bool:
    """Turn direct I/O, which bypasses the page cache, on or off. Returns whether that changed anything; some file
    systems cannot do it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | _O_DIRECT if direct else flags & ~_O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return wanted != flags


def _read_all(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Read into the parts, back to back. Returns the number of bytes, which is smaller at the end of the file."""
    left, got = [part for part in parts if len(part)], 0
    while left:
        try:
            count = _preadv(fd, left, offset + got)
        except OSError as error:
            # EINVAL: the device has larger blocks, the memory is not aligned, or this is the rest of a short read.
            if error.errno != errno.EINVAL or not _set_direct(fd, False):
                raise
            continue
        if count == 0:
            break
        got += count
        _drop_front(left, count)
    return got


def _preadv(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, parts, offset)
    data = os.pread(fd, len(parts[0]), offset)
    parts[0][: len(data)] = data
    return len(data)


def _pwritev(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    return os.pwritev(fd, parts, offset) if hasattr(os, "pwritev") else os.pwrite(fd, parts[0], offset)
