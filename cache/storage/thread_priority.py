"""How much of the processors a thread gets while the engine computes."""

import contextlib
import os
import sys
import threading

SAVING = 5  # pages are blocked until they are saved
WRITING = 10  # nobody waits for the disk


def lower_priority(by: int) -> None:
    """Of the calling thread, in steps of niceness, which Linux counts per thread. Elsewhere it stays as it is."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + by)
