"""Opens extents for reading. Verifies each header once, and logs each damaged extent once."""

import errno
import logging
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from reprise.cache.blocks.stored import ExtentInfo
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_file import CHUNK_BYTES, ParsedExtent, open_extent
from reprise.cache.storage.extent_format import ExtentForm
from reprise.cache.storage.extent_reader import ExtentReader
from reprise.cache.storage.io_threads import Beat, IoDeadline, IoThreads
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.shards import Shards
from reprise.cache.storage.throttle import Throttle

READ_THREADS = 8
MAX_CACHED_HEADER_BYTES = 32 << 20
# Errors of the whole device or its connection, and not of one file
_OF_THE_DEVICE = frozenset(
    {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.EREMOTEIO, errno.ETIMEDOUT}
)
_PROVES_NOTHING = frozenset({"io", "deadline", "memory"})
log = logging.getLogger(__name__)


class ExtentOpener:
    """An opener of extents for the ExtentStore, which also reads their headers. Thread-safe."""

    def __init__(
        self,
        *,
        shards: Shards,
        form: ExtentForm,
        throttle: Throttle,
        rare_log: RareLog,
        note_read: Callable[[str | None], None],
    ) -> None:
        """Set up. note_read: called with every error of the device, and with None for every read that succeeds."""
        self._shards = shards
        self._note_read = note_read
        self._form = form
        self._throttle, self._rare_log = throttle, rare_log
        self._headers = HeaderCache()
        self._buffers: deque[mmap.mmap] = deque(maxlen=READ_THREADS)
        sizes = form.sizes
        self._buffer_bytes = max(CHUNK_BYTES, *sizes.raw, *(sizes.coded or ()))
        self._lock = threading.Lock()  # guards what follows
        self._damaged: set[int] = set()  # extents whose damage has been logged

    def open(self, extent_id: int, threads: IoThreads, *, trust_cached: bool = True) -> ExtentReader:
        """Open an extent in one of the threads, in which its reader then reads. trust_cached: whether a header that was
        read before may be used if the file has not changed. Raises BlockMissing."""
        known = self._headers.get(extent_id) if trust_cached else None
        opened: list[int] = []

        def open_it(_: Beat) -> ParsedExtent:
            fd, extent = self._open(extent_id, known)
            opened.append(fd)
            return extent

        def close_late() -> None:
            for fd in opened:
                os.close(fd)

        try:
            extent = threads.call(open_it, late=close_late)
        except BlockMissing as missing:
            missing.extent_id = extent_id
            self._tell(extent_id, missing)
            raise
        except IoDeadline as error:
            late = BlockMissing(f"extent {extent_id:016x}: {error}", reason="deadline")
            self._tell(extent_id, late)
            raise late from error
        self._headers.put(extent_id, extent)
        return ExtentReader(
            fd=opened[0],
            extent=extent,
            io=threads,
            throttle=self._throttle,
            buffers=self._buffers,
            buffer_bytes=self._buffer_bytes,
            on_failure=partial(self._tell, extent_id),
            on_success=partial(self._note_read, None),
        )

    def read_info(self, extent_id: int) -> ExtentInfo:
        """Return an extent's contents as its header lists them. Blocks: called in an I/O thread. Raises
        BlockMissing."""
        fd, extent = self._open(extent_id, None)
        os.close(fd)
        return ExtentInfo(extent_id, extent.header.session, extent.header.blocks, extent.layout.size_bytes)

    def forget(self, extent_id: int) -> None:
        """Forget the header and the damage of an extent that is gone."""
        self._headers.drop(extent_id)
        with self._lock:
            self._damaged.discard(extent_id)

    def _open(self, extent_id: int, known: ParsedExtent | None) -> tuple[int, ParsedExtent]:
        return open_extent(
            self._shards.path(extent_id),
            fingerprint=self._form.fingerprint,
            segment_bytes=self._form.sizes.of(extent_id),
            key=self._form.key,
            extent_id=extent_id,
            known=known,
        )

    def _tell(self, extent_id: int, missing: BlockMissing) -> None:
        """Log why an extent could not be read. Damage is logged once per extent, since every reader would report it
        again. An error that proves nothing about the record (of the device, no answer, no memory) is logged rarely,
        since it may concern all extents."""
        if isinstance(cause := missing.__cause__, OSError) and cause.errno in _OF_THE_DEVICE:
            self._note_read(str(missing))
        if missing.reason in _PROVES_NOTHING:
            cannot = "a stored record cannot be read, its KV will be computed again: %s"
            self._rare_log.warn(f"read {missing.reason}", cannot, missing)
            return
        with self._lock:
            if extent_id in self._damaged:
                return
            self._damaged.add(extent_id)
        problem = "gone" if missing.reason == "missing" else "damaged"
        log.warning("a stored record is %s, its KV will be computed again: %s (%s)", problem, missing, missing.reason)


class HeaderCache:
    """A cache of parsed headers; the least recently used are dropped first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents: OrderedDict[int, ParsedExtent] = OrderedDict()
        self._bytes = 0

    def get(self, extent_id: int) -> ParsedExtent | None:
        with self._lock:
            extent = self._extents.get(extent_id)
            if extent is not None:
                self._extents.move_to_end(extent_id)
            return extent

    def put(self, extent_id: int, extent: ParsedExtent) -> None:
        with self._lock:
            self._drop(extent_id)
            self._extents[extent_id] = extent
            self._bytes += extent.layout.header_bytes
            while self._bytes > MAX_CACHED_HEADER_BYTES:
                self._drop(next(iter(self._extents)))

    def drop(self, extent_id: int) -> None:
        with self._lock:
            self._drop(extent_id)

    def _drop(self, extent_id: int) -> None:
        extent = self._extents.pop(extent_id, None)
        if extent is not None:
            self._bytes -= extent.layout.header_bytes
