"""Gives background threads less processor time than the engine's computations."""

import contextlib
import os
import sys
import threading

SAVING = 5  # pages are blocked until they are saved
WRITING = 10  # no request waits for writes to disk


def lower_priority(by: int) -> None:
    """Lower the priority of the calling thread by `by` steps of niceness. Linux counts niceness per thread; on other
    systems this does nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + by)
