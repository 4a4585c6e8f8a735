"""Tells errors of a device apart: a lack of memory passes, but a sticky error stays until the process ends.

torch raises classes of its own for both on a device. Triton, cuBLAS, cuDNN and torch's allocator of host memory raise
plain RuntimeErrors, which only their text tells apart. Python's own allocations raise MemoryError or OSError.
"""

import errno

import torch

_OF_A_DEVICE = ("cuda", "cublas", "cudnn", "triton")
_NO_MEMORY = ("out of memory", "status_alloc_failed", "can't allocate memory", "not enough memory")
_WHILE_CAPTURING = ("captur",)  # refused while a graph is made, or by the graph's end; the device goes on
_STICKY = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "invalid address space",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "device-side assert",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "status_execution_failed",
    "status_internal_error",
    "status_mapping_error",
)


MEMORY_ERRORS = (RuntimeError, MemoryError, OSError)
"""The exception classes for which `lacks_memory` may be true."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory, as torch, the driver, a library or Python
    words it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _mentions(error, _NO_MEMORY)
    )


def is_sticky(error: BaseException) -> bool:
    """Return whether this error or its cause says that a device has failed for good: all later calls fail too."""
    cause: BaseException | None = error
    while cause is not None:
        if _stays(cause):
            return True
        cause = cause.__cause__
    return False


def _stays(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or lacks_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return not _mentions(error, _WHILE_CAPTURING)
    return _mentions(error, _OF_A_DEVICE) and _mentions(error, _STICKY)


def _mentions(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in phrases)
