"""Reads a stored extent into the caller's memory."""

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_file import (
    ParsedExtent,
    altered,
    check_segments,
    io_buffer,
    read_layers,
    read_segments,
)
from reprise.cache.storage.extent_format import ExtentHeader
from reprise.cache.storage.io_threads import Beat, IoDeadline, IoThreads
from reprise.cache.storage.throttle import Throttle

T = TypeVar("T")
Landed = Callable[[int], int]
"""Called in any thread with the number of layers that have been read. Returns how many to read next; 0: stop."""


class ExtentReader:
    """A reader of one extent; a context manager. Must be used by one thread at a time."""

    def __init__(
        self,
        *,
        fd: int,
        extent: ParsedExtent,
        io: IoThreads,
        throttle: Throttle,
        buffers: deque[mmap.mmap],
        buffer_bytes: int,
        on_failure: Callable[[BlockMissing], None],
        on_success: Callable[[], None],
    ) -> None:
        self._fd: int | None = fd
        self._extent = extent
        self._io, self._throttle = io, throttle
        self._buffers, self._buffer_bytes = buffers, buffer_bytes
        self._on_failure, self._on_success = on_failure, on_success

    def __enter__(self) -> "ExtentReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def header(self) -> ExtentHeader:
        return self._extent.header

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a network file system may fail; nothing was written
                os.close(self._fd)
            self._fd = None

    def read(self, layer: int, blocks: Sequence[int], out: Sequence[memoryview]) -> None:
        """Fill out[i] with the segment of blocks[i] in this layer; each is as long as the layer's segments. Only
        verified bytes are copied to `out`, and never after this has returned or raised. Raises BlockMissing."""
        size = self._extent.layout.segment_bytes[layer]
        targets = [flat(view) for view in out]
        if len(targets) != len(blocks) or any(len(view) != size for view in targets):
            raise ValueError(f"one buffer of {size} bytes per block")
        if not all(0 <= block < len(self._extent.header.blocks) for block in blocks):
            raise ValueError("no such block in this extent")
        # Read into a buffer of our own. A read that hangs cannot be cancelled, and when it finishes at last, the memory
        # of `out` may belong to another conversation. The caller's thread copies, so `out` is still valid then.
        step = max(1, self._buffer_bytes // size)
        for start in range(0, len(blocks), step):
            self._read_some(layer, blocks[start : start + step], targets[start : start + step])

    def land(
        self,
        first_layer: int,
        wanted: "Sequence[tuple[ExtentReader, Sequence[int]]]",
        outs: Sequence[memoryview],
        landed: Landed,
    ) -> int:
        """Fill each of `outs` with one layer, beginning with `first_layer`, without verifying anything. A layer
        consists of the given blocks' segments, back to back, in the order of `wanted`; all readers must belong to the
        same tier. Returns the number of layers read. Raises BlockMissing; if its reason is `deadline`, the kernel may
        still write to `outs`, and `landed` may be called once more.

        landed(number of layers just read): called as layers arrive while more are to come. It returns how many layers
        to read next; 0 ends the read. The first layer is read alone.

        Without a bandwidth cap this is a single call of an I/O thread, because each such call costs more processor time
        than the transfer. Bypasses the page cache where `outs` begin at pages and segments are whole pages.
        """
        layers = range(first_layer, first_layer + len(outs))
        sizes = self._extent.layout.segment_bytes
        count = sum(len(blocks) for _, blocks in wanted)
        if any(len(out) != sizes[layer] * count for layer, out in zip(layers, outs, strict=True)):
            raise ValueError("as many bytes as the layer's segments have")
        open_readers = [(reader, reader._descriptor(), blocks) for reader, blocks in wanted]

        def bring(at: int, number: int, beat: Beat) -> None:
            before = 0  # blocks of the readers read before
            for reader, fd, blocks in open_readers:
                pieces = [
                    out[before * sizes[layer] : (before + len(blocks)) * sizes[layer]]
                    for layer, out in zip(layers[at : at + number], outs[at : at + number], strict=True)
                ]
                with reader._telling_failure():
                    reader._land(fd, layers[at], blocks, pieces, beat)
                before += len(blocks)

        readers = [reader for reader, _ in wanted]

        def bring_slowly(at: int, number: int) -> None:
            stored = (
                reader._extent.layout.stored_bytes(layer, blocks)
                for layer in layers[at : at + number]
                for reader, blocks in wanted
            )
            due = self._throttle.book(sum(stored))
            self._call(lambda beat: bring(at, number, beat), readers)
            self._throttle.wait(due)  # not in the I/O thread, whose deadline measures the device

        if self._throttle.is_capped:
            return in_turn(len(outs), bring_slowly, landed)
        return self._call(lambda beat: in_turn(len(outs), lambda at, number: bring(at, number, beat), landed), readers)

    def _land(self, fd: int, first_layer: int, blocks: Sequence[int], outs: Sequence[memoryview], beat: Beat) -> None:
        """Read layers in an I/O thread, in each call at most as much as a deadline allows for. Raises BlockMissing."""
        sizes = self._extent.layout.segment_bytes
        is_whole = list(blocks) == list(range(len(self._extent.header.blocks)))
        at = 0
        while at < len(outs):
            layer = first_layer + at
            together = 1
            if is_whole:
                held = len(outs[at])
                while at + together < len(outs) and held + len(outs[at + together]) <= self._buffer_bytes:
                    held += len(outs[at + together])
                    together += 1
            if together > 1:
                read_layers(fd, self._extent, layer, outs[at : at + together])
                beat()
            else:
                step = max(1, self._buffer_bytes // sizes[layer])
                for start in range(0, len(blocks), step):
                    some = blocks[start : start + step]
                    part = outs[at][start * sizes[layer] : (start + len(some)) * sizes[layer]]
                    read_segments(fd, self._extent, layer, some, part)
                    beat()
            at += together

    def tell_altered(self, layer: int, block: int) -> None:
        """Report that a segment read by `land` differs from what was stored."""
        self._on_failure(altered(self._extent, layer, block))

    def checksums(self, block: int, key: BlockKey) -> tuple[bytes, ...]:
        """Return the checksums, by layer, of the segments of the extent's block at index `block`. Raises BlockMissing
        if that block does not have the key `key`: the cache's table may be wrong."""
        header = self._extent.header
        if not 0 <= block < len(header.blocks) or header.blocks[block].key != key:
            problem = f"extent {header.extent_id:016x} has no such block {block}"
            raise BlockMissing(problem, reason="format", extent_id=header.extent_id, block=block)
        return header.checksums_of(block)

    def check(self) -> None:
        """Read and verify everything. Raises BlockMissing."""
        num_blocks = len(self._extent.header.blocks)
        for layer, size in enumerate(self._extent.layout.segment_bytes):
            scratch = memoryview(bytearray(size))
            for block in range(num_blocks):
                self.read(layer, [block], [scratch])

    def _read_some(self, layer: int, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        size = self._extent.layout.segment_bytes[layer]
        try:
            buffer = self._buffers.pop()
        except IndexError:
            try:
                buffer = io_buffer(self._buffer_bytes)
            except OSError as error:
                lacking = BlockMissing(f"no memory to read into: {error}", reason="memory")
                self._on_failure(lacking)
                raise lacking from error
        view = memoryview(buffer)[: size * len(blocks)]

        fd = self._descriptor()

        def read(_: Beat) -> None:
            with self._telling_failure():
                read_segments(fd, self._extent, layer, blocks, view)
                check_segments(self._extent, layer, blocks, view)

        due = self._throttle.book(self._extent.layout.stored_bytes(layer, blocks))
        try:
            self._call(read, [self])
            for i, target in enumerate(targets):
                target[:] = view[i * size : (i + 1) * size]
        finally:
            if self._fd is not None:  # otherwise an abandoned read may still write to it
                self._buffers.append(buffer)
        self._throttle.wait(due)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise BlockMissing("an earlier read of this extent hangs, or it is closed", reason="deadline")
        return self._fd

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        try:
            yield
        except BlockMissing as missing:
            self._on_failure(missing)
            raise

    def _call(self, work: Callable[[Beat], T], readers: "Sequence[ExtentReader]") -> T:
        """Run `work` in an I/O thread, within the deadline. readers: those whose file descriptors it uses. Raises
        BlockMissing."""
        descriptors = [reader._descriptor() for reader in readers]

        def close_late() -> None:
            for fd in descriptors:
                os.close(fd)

        try:
            result = self._io.call(work, late=close_late)
        except IoDeadline as error:
            if error.began:
                for reader in readers:
                    # the thread that still uses it closes it, so that its number cannot be reused meanwhile
                    reader._fd = None
            late = BlockMissing(f"extent {self._extent.header.extent_id:016x}: {error}", reason="deadline")
            self._on_failure(late)
            raise late from error
        self._on_success()
        return result


def in_turn(count: int, bring: Callable[[int, int], None], landed: Landed) -> int:
    """Call `bring(first, number)` for one item, then for as many as `landed` returns, until it returns 0 or `count`
    items were brought. Calls `landed` after every step but the last. Returns how many were brought."""
    at, number = 0, 1
    while True:
        number = min(number, count - at)
        bring(at, number)
        at += number
        if at == count or not (number := landed(number)):
            return at


def flat(view: memoryview) -> memoryview:
    """Return the same memory as a view of bytes."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
