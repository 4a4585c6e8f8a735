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
from collections.abc import Iterator, Sequence

from torch import Tensor

from cache.tiers.dram import Slab
from cache.tiers.priority import lower_priority
from kernels.attention.base import KvPages

AHEAD_BYTES = 512 << 20  # of slots behind the last one used, while nothing runs: gigabytes may never be needed
BUSY_AHEAD_BYTES = 64 << 20  # while something does; more than a second of prefill fills
_PIECE_BYTES = 128 << 20  # at a time
_CALL_BYTES = 1 << 20  # of one call, which holds up whoever maps memory meanwhile
_LOWEST = 19
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: as if every page were written, with what is in it
log = logging.getLogger(__name__)


class FirstTouch:
    """Called by the engine's thread; the work is done on short-lived threads of the lowest priority, one at a time.
    Contents never change, so it may go on beside anything. Does nothing where the kernel cannot do it, and with
    memory that is page-locked or a device's."""

    def __init__(self, *, pages: Sequence[KvPages], slab: Slab) -> None:
        self._pool = [x for layer in pages for x in (layer.k, layer.v) if not x.is_cuda]
        if sum(x.numel() * x.itemsize for x in self._pool) > AHEAD_BYTES:
            self._pool = []  # contexts lie anywhere in it, so only all of it would do
        self._slab = slab
        self._slots = 0 if any(x.is_pinned() for x in self._segments()) else slab.num_slots
        self._ready = 0  # leading slots that were touched
        self._thread: threading.Thread | None = None
        self._populate = _madvise()

    def _segments(self) -> list[Tensor]:
        return [self._slab.segments(layer) for layer in range(self._slab.num_layers)] if self._slab.num_slots else []

    def go_on(self, slots_used: int, *, busy: bool) -> None:
        """Begin with what is to be ready next, if anything is. slots_used: the leading slots that were ever filled."""
        if self._populate is None or (self._thread is not None and self._thread.is_alive()):
            return
        ahead = (BUSY_AHEAD_BYTES if busy else AHEAD_BYTES) // max(1, self._slab.slot_bytes)
        piece = max(1, _PIECE_BYTES // max(1, self._slab.slot_bytes))
        first = max(self._ready, slots_used)
        last = min(self._slots, slots_used + ahead, first + piece)
        pool = self._pool if not busy else []
        if pool or last > first:
            self._thread = threading.Thread(target=self._run, args=(pool, first, last), name="kv-touch", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, pool: Sequence[Tensor], first: int, last: int) -> None:
        lower_priority(_LOWEST)
        try:
            for memory in pool:
                self._touch(memory, 0, memory.numel() * memory.itemsize)
            for memory, size in zip(self._segments(), self._slab.segment_bytes, strict=True) if last > first else ():
                self._touch(memory, first * size, last * size)
        except OSError as error:  # an older kernel, or no memory left: it will be touched by whoever needs it
            log.debug("memory is not touched ahead: %s", error)
            self._populate = None
        if pool:
            self._pool = []
        self._ready = max(self._ready, last)

    def _touch(self, memory: Tensor, start: int, stop: int) -> None:
        assert self._populate is not None
        for address, size in _whole_pages(memory.data_ptr() + start, memory.data_ptr() + stop):
            if self._populate(address, size, _POPULATE_WRITE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _madvise() -> "ctypes._NamedFuncPointer | None":
    """libc's; None where there is no such advice."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _whole_pages(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the calls for the pages that lie inside."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, stop = -(-start // page) * page, stop // page * page
    for address in range(start, stop, _CALL_BYTES):
        yield address, min(_CALL_BYTES, stop - address)
