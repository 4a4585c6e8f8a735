"""Moves the memory of an engine into large pages, once, before it serves.

A decode step reads every weight. With pages of 4 KiB the addresses of the weights exceed the processor's TLB, and its
prefetching stops at the end of each page. By itself the kernel provides large pages only where the operator has set
`transparent_hugepage` to `always`. Decision 0047 has the measurement.
"""

import ctypes
import logging
import mmap
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SIZE = 2 << 20
_LIMIT_S = 20.0  # moving 1 GB took 0.6 to 3 s
_MAX_FAILURES = 64  # failures in a row; then no large pages are available
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1: moves existing pages into one large page
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0\s*(\[heap\])?")
log = logging.getLogger(__name__)


def move_into_large_pages(limit_s: float = _LIMIT_S) -> int:
    """Move this process's memory into large pages, the largest allocations first, for at most limit_s seconds. Returns
    the number of bytes that lie in large pages now. Contents never change. Memory that is only partly in use is left
    alone, so that the process does not grow. Does nothing where the kernel does not support it."""
    libc = _libc()
    if libc is None:
        return 0
    started, moved, failures = time.monotonic(), 0, 0
    for address in _candidates():
        if failures == _MAX_FAILURES or time.monotonic() - started > limit_s:
            break
        if not _is_resident(libc, address):
            continue
        if libc.madvise(address, SIZE, _COLLAPSE):
            failures += 1
        else:
            moved, failures = moved + SIZE, 0
    log.debug("%.0f MiB lie in large pages, after %.2f s", moved / (1 << 20), time.monotonic() - started)
    return moved


def _is_resident(libc: ctypes.CDLL, address: int) -> bool:
    state = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    return not libc.mincore(address, SIZE, state) and all(page & 1 for page in state)


def _candidates() -> Iterator[int]:
    """Yield the addresses of possible large pages in private anonymous memory, those of the largest mapping first."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [(int(found[1], 16), int(found[2], 16)) for line in lines if (found := _ANONYMOUS.fullmatch(line))]
    for start, end in sorted(spans, key=lambda span: span[0] - span[1]):
        yield from range(-(-start // SIZE) * SIZE, end // SIZE * SIZE, SIZE)


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
