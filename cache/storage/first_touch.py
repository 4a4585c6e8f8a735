"""Memory that the kernel has handed out before somebody computes into it.

An allocation has no memory until it is first written: then each 4 KiB page stops whoever writes, a worker of the step's
team as a rule, and the others wait for it. On a virtual machine whose host has to find the page too that took 15 us,
with three pages to a token of the 125 M model 4 % of all processor time, for as long as DRAM was filling.
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from cache.storage.large_pages import LargePages
from cache.storage.slab import Slab
from cache.storage.thread_priority import lower_priority
from kernels.attention.ragged_batch import KvPages

AHEAD_BYTES = 512 << 20  # behind the last slot or page used, while nothing runs: gigabytes may never be needed
BUSY_AHEAD_BYTES = 64 << 20  # while something does; more than a second of prefill fills
_PIECE_BYTES = 128 << 20  # at a time
_CALL_BYTES = 256 << 10  # of one call, which holds up whoever maps memory meanwhile
_LOWEST = 19
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: as if every page were written, with what is in it
Span = tuple[int, int]
"""Address and bytes."""
log = logging.getLogger(__name__)


class _Memory(Protocol):
    """Places of equal size, used from the first one on, as far as that can be."""

    count: int
    size: int  # bytes of one
    ready: int  # leading ones that were touched

    def spans(self, start: int, stop: int) -> list[Span]:
        """Where the bytes of some places lie."""
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
        # Heads are outermost, or pages are: then all of a page lies in one piece.
        starts = [head * per_head for head in range(heads)] if per_head > per_page else [0]
        length = (stop - start - 1) * per_page + (rows - 1) * per_row + dim
        if per_head <= per_page:
            length += (heads - 1) * per_head
        return [(x.data_ptr() + (first + start * per_page) * x.itemsize, length * x.itemsize) for first in starts]


class FirstTouch:
    """Called by the engine's thread; the work is done on short-lived threads of the lowest priority, one at a time.
    Contents never change, so it may go on beside anything. Does nothing where the kernel cannot do it, and with
    memory that is page-locked or a device's."""

    def __init__(self, *, pages: Sequence[KvPages], slab: Slab, large_pages: LargePages | None = None) -> None:
        """large_pages: who makes them of what is there, when there is nothing to be touched."""
        self._large_pages = large_pages
        self._slots: _Slots | None = None
        if slab.num_slots and not any(slab.segments(layer).is_pinned() for layer in range(slab.num_layers)):
            self._slots = _Slots(slab)
        self._pages = None if pages[0].k.is_cuda else _Pages(pages)
        self._num_pages = len(pages[0].k)
        self._thread: threading.Thread | None = None
        self._populate = _madvise()

    @property
    def pages_ready(self) -> int:
        """The leading pages of HBM's pool that are in memory; all, where that is not for us to see to."""
        return self._num_pages if self._pages is None or self._populate is None else self._pages.ready

    def go_on(self, slots_used: int, pages_used: int, is_busy: Callable[[], bool]) -> None:
        """Begin with what is to be ready next, if anything is. slots_used, pages_used: the leading ones that were ever
        taken; is_busy: whether something runs, asked by the thread too: then it leaves what can wait to another time,
        for it takes a processor from who computes whatever its priority."""
        if self._populate is None or (self._thread is not None and self._thread.is_alive()):
            return
        if self._slots is not None:  # these are taken one after the other, and have been written
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
        elif self._large_pages is not None:
            self._large_pages.go_on(is_busy)

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, work: Sequence[tuple[_Memory, int, int]], is_busy: Callable[[], bool]) -> None:
        lower_priority(_LOWEST)
        try:
            for memory, needed, wanted in work:
                while memory.ready < (end := needed if is_busy() else wanted):
                    stop = min(end, memory.ready + max(1, _CALL_BYTES // memory.size))
                    for address, size in memory.spans(memory.ready, stop):
                        self._touch(address, size)
                    memory.ready = stop
        except OSError as error:  # an older kernel, or no memory left: it will be touched by whoever needs it
            log.debug("memory is not touched ahead: %s", error)
            self._populate = None

    def _touch(self, address: int, size: int) -> None:
        """The page at either end belongs to neighbours too."""
        assert self._populate is not None
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = address // page * page, (address + size) // page * page
        if last > first and self._populate(first, last - first, _POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _madvise() -> "ctypes._NamedFuncPointer | None":
    """libc's; None where there is no such advice."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
