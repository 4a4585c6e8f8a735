"""Writes extents: encodes the header, reserves the room and stores the bytes, all or nothing."""

import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from reprise.cache.storage.extent_file import CHUNK_BYTES, io_buffer, temporary_of, write_extent
from reprise.cache.storage.extent_format import ExtentForm, ExtentHeader, Layout, encode_header
from reprise.cache.storage.io_threads import Beat
from reprise.cache.storage.shards import Shards
from reprise.cache.storage.space import DiskSpace
from reprise.cache.storage.throttle import Throttle

# separate from the read threads, so that reads do not wait for writes that hang, nor writes for reads
WRITE_THREADS = 4


@dataclass(frozen=True, slots=True)
class EncodedExtent:
    """An extent as it will be written to its file."""

    info: ExtentInfo
    header: bytes
    layout: Layout
    segments: Sequence[Sequence[memoryview]]  # bytes of each layer's blocks in order, in any number of pieces


class ExtentWriter:
    """A writer of extents for the ExtentStore. Thread-safe."""

    def __init__(
        self,
        *,
        shards: Shards,
        space: DiskSpace,
        form: ExtentForm,
        throttle: Throttle,
    ) -> None:
        self._shards, self._space = shards, space
        self._form = form
        self._throttle = throttle
        self._buffers: deque[mmap.mmap] = deque(maxlen=WRITE_THREADS)

    def encode(
        self,
        extent_id: int,
        session: SessionRecord,
        blocks: Sequence[StoredBlock],
        checksums: bytes,
        segments: Sequence[Sequence[memoryview]],
    ) -> EncodedExtent:
        """Encode an extent for writing. Raises ValueError for segments of another size, and for more than a record may
        hold."""
        sizes = self._form.sizes.of(extent_id)
        for size, pieces in zip(sizes, segments, strict=True):
            if sum(map(len, pieces)) != size * len(blocks):
                raise ValueError(f"a segment of this layer has {size} bytes")
        header = ExtentHeader(
            fingerprint=self._form.fingerprint,
            extent_id=extent_id,
            session=session,
            blocks=tuple(blocks),
            segment_bytes=sizes,
            checksums=checksums,
        )
        encoded = encode_header(header, self._form.key)
        layout = Layout.of(header_bytes=len(encoded), segment_bytes=sizes, num_blocks=len(blocks))
        return EncodedExtent(
            ExtentInfo(extent_id, session, header.blocks, layout.size_bytes), encoded, layout, segments
        )

    def write(self, extent: EncodedExtent, beat: Beat) -> float:
        """Write an extent, durable on return. Returns the time until which the bandwidth cap makes the caller wait;
        pass it to `wait`. beat: called between the steps, so that a deadline applies to each. Blocks: called in an I/O
        thread. Raises TierFull, OSError."""
        extent_id, size_bytes = extent.info.extent_id, extent.info.size_bytes
        self._space.reserve(size_bytes)
        due = self._throttle.book(size_bytes)
        path, stored = self._shards.path(extent_id), False
        try:
            self._shards.make_missing(extent_id, beat)
            beat()
            self._write_file(path, extent, beat)
            stored = True
        finally:
            stays = stored or os.path.exists(path) or os.path.exists(temporary_of(path))
            self._space.settle(extent_id, size_bytes, stored=stored, stays=stays)
        return due

    def wait(self, due: float) -> None:
        """Wait until `due`, as the bandwidth cap demands. Must not be called in an I/O thread, whose deadline measures
        the device."""
        self._throttle.wait(due)

    def _write_file(self, path: str, extent: EncodedExtent, beat: Beat) -> None:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = io_buffer(CHUNK_BYTES)
        try:
            write_extent(
                path=path,
                header=extent.header,
                layout=extent.layout,
                segments=extent.segments,
                buffer=buffer,
                beat=beat,
            )
        finally:
            self._buffers.append(buffer)
