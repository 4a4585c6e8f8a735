"""Ends a process together with its parent. The parent sends commands on stdin, and keeps stdin open as long as it
lives."""

import ctypes
import os
import signal
import struct
import sys
from threading import Thread

FRAME_LENGTH = struct.Struct(">I")
PR_SET_PDEATHSIG = 1


def read_frame(fd: int) -> bytes:
    """Read one frame and return its content. The length of the frame precedes it. Raises EOFError."""
    (length,) = FRAME_LENGTH.unpack(_read_exactly(fd, FRAME_LENGTH.size))
    return _read_exactly(fd, length)


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            raise EOFError("stdin ended before it said what to load")
        data += chunk
    return data


def die_with_parent(stdin: int) -> None:
    """Start a thread that exits the process at the end of `stdin`, which comes when the parent is gone, however it
    ended. An orphan would keep the memory and answer no request. Later reads of `stdin` find it empty."""
    lifeline = os.dup(stdin)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), stdin)  # libraries and compilers that read stdin must not touch the lifeline

    def wait_for_end() -> None:
        while os.read(lifeline, 4096):
            pass
        os._exit(1)

    Thread(target=wait_for_end, name="lifeline", daemon=True).start()
    if sys.platform == "linux":
        # Have the kernel kill us too, in case a step holds the GIL. It does so when the thread that started us ends:
        # of the app the one that runs its event loop, of an engine the one that runs its steps.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
