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

from torch import Tensor

from cache.tiers.dram import Slab
from cache.tiers.priority import lower_priority
from kernels.attention.base import KvPages

AHEAD_BYTES = 512 << 20  # of slots behind the last one used, while nothing runs: gigabytes may never be needed
BUSY_AHEAD_BYTES = 64 << 20  # while something does; more than a second of prefill fills
_PIECE_BYTES = 128 << 20  # at a time
_CALL_BYTES = 256 << 10  # of one call, which holds up whoever maps memory meanwhile
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
        self._pool_done = 0  # bytes of the last one
        self._ready = 0  # leading slots that were touched
        self._thread: threading.Thread | None = None
        self._populate = _madvise()

    def _segments(self) -> list[Tensor]:
        return [self._slab.segments(layer) for layer in range(self._slab.num_layers)] if self._slab.num_slots else []

    def go_on(self, slots_used: int, is_busy: Callable[[], bool]) -> None:
        """Begin with what is to be ready next, if anything is. slots_used: the leading slots that were ever filled;
        is_busy: whether something runs, asked by the thread too: then it leaves what can wait to another time, for
        it takes a processor from who computes whatever its priority."""
        if self._populate is None or (self._thread is not None and self._thread.is_alive()):
            return
        wanted = min(self._slots, slots_used + self._slots_of(AHEAD_BYTES))
        needed = min(self._slots, slots_used + self._slots_of(BUSY_AHEAD_BYTES))
        self._ready = max(self._ready, slots_used)
        if self._ready < (needed if is_busy() else wanted) or (self._pool and not is_busy()):
            work = (min(wanted, self._ready + self._slots_of(_PIECE_BYTES)), needed, is_busy)
            self._thread = threading.Thread(target=self._run, args=work, name="kv-touch", daemon=True)
            self._thread.start()

    def _slots_of(self, size: int) -> int:
        return max(1, size // max(1, self._slab.slot_bytes))

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, wanted: int, needed: int, is_busy: Callable[[], bool]) -> None:
        lower_priority(_LOWEST)
        try:
            while self._pool and not is_busy():
                memory = self._pool[-1]
                size = memory.numel() * memory.itemsize
                self._pool_done = self._touch(memory, self._pool_done, min(size, self._pool_done + _CALL_BYTES))
                if self._pool_done == size:
                    self._pool.pop()
                    self._pool_done = 0
            while self._ready < (end := needed if is_busy() else wanted):
                stop = min(end, self._ready + self._slots_of(_CALL_BYTES))
                for memory, size in zip(self._segments(), self._slab.segment_bytes, strict=True):
                    self._touch(memory, self._ready * size, stop * size)
                self._ready = stop
        except OSError as error:  # an older kernel, or no memory left: it will be touched by whoever needs it
            log.debug("memory is not touched ahead: %s", error)
            self._populate = None

    def _touch(self, memory: Tensor, start: int, stop: int) -> int:
        """Bytes `start` to `stop`; returns `stop`. The page at either end belongs to neighbours too."""
        assert self._populate is not None
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = ((memory.data_ptr() + at) // page * page for at in (start, stop))
        if last > first and self._populate(first, last - first, _POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return stop


def _madvise() -> "ctypes._NamedFuncPointer | None":
    """libc's; None where there is no such advice."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
