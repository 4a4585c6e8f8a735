"""Asks a disk whether it answers: past the page cache, which would answer for a disk that is gone."""

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterable

from reprise.cache.storage.io_threads import Beat

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BYTES = mmap.PAGESIZE  # read and written


def ask_device(*, read: Iterable[str], write: str, beat: Beat, deadline_s: float) -> None:
    """Return if a page can be read of each of the files `read`, and written to the file `write`, which is deleted,
    within the deadline in all. A disk that is full or read-only answers: what lies on it can be read. beat: called
    before each of these steps; it may raise to stop. Blocks. Raises OSError."""
    started = time.monotonic()
    for path in read:
        beat()
        _read(path)
    beat()
    try:
        _write(write)
    except OSError as error:
        if error.errno not in {*NO_ROOM, errno.EROFS}:
            raise
    if (taken_s := time.monotonic() - started) > deadline_s:
        raise OSError(errno.ETIMEDOUT, f"it took {taken_s:.1f} s to answer")


def _read(path: str) -> None:
    """Read the first page of a file. A file that was deleted says nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(fd, [bytearray(_BYTES)], 0)
    finally:
        os.close(fd)


def _write(path: str) -> None:
    """Write a page durably."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.pwritev(fd, [bytes(_BYTES)], 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
