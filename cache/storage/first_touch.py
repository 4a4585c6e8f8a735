"""Makes the kernel provide memory before a computation first writes to it.

Allocated memory has no physical pages until it is first written. Then every 4 KiB page stops the writer, usually a
worker of the step's team, while the other workers wait for it. On a virtual machine whose host had to find the page
too, that took 15 us; with three pages per token of the 125 M model this was 4 % of all processor time for as long as
DRAM was filling.
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from reprise.cache.storage.slab import Slab
from reprise.cache.storage.thread_priority import lower_priority
from reprise.kernels.attention.ragged_batch import KvPages

# Bytes touched beyond the last used slot or page while nothing runs; not all memory, since much may never be needed.
AHEAD_BYTES = 512 << 20
BUSY_AHEAD_BYTES = 64 << 20  # bytes touched ahead while something runs; more than a second of prefill fills
_PIECE_BYTES = 128 << 20  # most bytes touched at once, beyond those needed soon
_CALL_BYTES = 256 << 10  # most bytes per system call, which blocks all other threads that map memory
_LOWEST_NICENESS = 19
# MADV_POPULATE_WRITE, Linux 5.14: acts as if every page were written, without changing its contents
_POPULATE_WRITE = 23
Span = tuple[int, int]
"""A span of memory: (address, size in bytes)."""
log = logging.getLogger(__name__)


class _Memory(Protocol):
    """The memory of a pool of DRAM slots or HBM pages, called places here. Places are of equal size and are mostly
    taken in order, from the first one on."""

    count: int
    size: int  # size of one place in bytes
    ready: int  # number of leading places that are in memory

    def spans(self, start: int, stop: int) -> list[Span]:
        """Return the ranges of memory that hold the bytes of slots or pages `start` to `stop` - 1."""
        ...


class _Slots:
    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.count, self.size, self.ready = slab.num_slots, max(1, slab.slot_bytes), 0

    def spans(self, start: int, stop: int) -> list[Span]:
        layers = (
            (self._slab.segments(layer), self._slab.segment_bytes[layer]) for layer in range(self._slab.num_layers)
        )
        return [(memory.data_ptr() + start * size, (stop - start) * size) for memory, size in layers]


class _Pages:
    def __init__(self, pages: Sequence[KvPages]) -> None:
        self._tensors = [x for layer in pages for x in (layer.k, layer.v)]
        self.count, self.ready = len(pages[0].k), 0
        self.size = sum(x[0].numel() * x.itemsize for x in self._tensors)

    def spans(self, start: int, stop: int) -> list[Span]:
        return [span for x in self._tensors for span in self._of(x, start, stop)]

    @staticmethod
    def _of(x: Tensor, start: int, stop: int) -> list[Span]:
        _, rows, heads, dim = x.shape
        per_page, per_row, per_head, _ = x.stride()
        # Either heads or pages are the outermost dimension; if pages are, all of a page lies in one piece.
        starts = [head * per_head for head in range(heads)] if per_head > per_page else [0]
        length = (stop - start - 1) * per_page + (rows - 1) * per_row + dim
        if per_head <= per_page:
            length += (heads - 1) * per_head
        return [(x.data_ptr() + (first + start * per_page) * x.itemsize, length * x.itemsize) for first in starts]


class FirstTouch:
    """A part that touches memory ahead of its use: it has the kernel provide physical pages for it, so that a
    computation need not wait for them. Called by the engine's thread; short-lived threads of the lowest priority do the
    work, one at a time. Contents never change, so this may run at any time. Does nothing where the kernel does not
    support it, and for memory that is page-locked or on a device."""

    def __init__(self, *, pages: Sequence[KvPages], slab: Slab) -> None:
        self._slots: _Slots | None = None
        if slab.num_slots and not any(slab.segments(layer).is_pinned() for layer in range(slab.num_layers)):
            self._slots = _Slots(slab)
        self._pages = None if pages[0].k.is_cuda else _Pages(pages)
        self._num_pages = len(pages[0].k)
        self._thread: threading.Thread | None = None
        self._populate = _madvise()

    @property
    def pages_ready(self) -> int:
        """The number of pages of the HBM pool, counted from the first, whose memory has been touched; all of them if
        touching is not done here."""
        return self._num_pages if self._pages is None or self._populate is None else self._pages.ready

    def go_on(self, slots_used: int, pages_used: int, is_busy: Callable[[], bool]) -> None:
        """Start touching the next memory that will be needed, if any.

        slots_used, pages_used: how many slots and pages, counted from the first, were ever used. is_busy: returns
        whether any request runs. The thread asks it too, and while it is true leaves work that can wait: at any
        priority, the thread takes a processor from the computation.
        """
        if self._populate is None or (self._thread is not None and self._thread.is_alive()):
            return
        if self._slots is not None:  # slots are used in order, so these have been written
            self._slots.ready = max(self._slots.ready, slots_used)
        work = []
        for memory, used in ((self._pages, pages_used), (self._slots, slots_used)):
            if memory is None:
                continue
            needed, wanted = (
                min(memory.count, used + max(1, ahead // memory.size)) for ahead in (BUSY_AHEAD_BYTES, AHEAD_BYTES)
            )
            if memory.ready < (needed if is_busy() else wanted):
                work.append((memory, needed, min(wanted, memory.ready + max(1, _PIECE_BYTES // memory.size))))
        if work:
            self._thread = threading.Thread(target=self._run, args=(work, is_busy), name="kv-touch", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until no thread is running."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, work: Sequence[tuple[_Memory, int, int]], is_busy: Callable[[], bool]) -> None:
        lower_priority(_LOWEST_NICENESS)
        try:
            for memory, needed, wanted in work:
                while memory.ready < (end := needed if is_busy() else wanted):
                    stop = min(end, memory.ready + max(1, _CALL_BYTES // memory.size))
                    for address, size in memory.spans(memory.ready, stop):
                        self._touch(address, size)
                    memory.ready = stop
        except OSError as error:  # an older kernel, or no memory left: memory is then provided on first use, as usual
            log.debug("memory cannot be touched ahead of its use: %s", error)
            self._populate = None

    def _touch(self, address: int, size: int) -> None:
        """Touch all pages of this span; the first and the last page may also belong to other memory."""
        assert self._populate is not None
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = address // page * page, (address + size) // page * page
        if last > first and self._populate(first, last - first, _POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _madvise() -> "ctypes._NamedFuncPointer | None":
    """Return libc's madvise, or None where there is none."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
