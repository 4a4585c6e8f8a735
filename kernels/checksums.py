"""Computes the checksums of many segments at once, without the GIL, and on several threads if there are processors to
spare."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from reprise.kernels.cpu.available import load_kernels

Sums = NDArray[np.uint64]
_MOST_THREADS = 4
_PROCESSORS_EACH = 4  # processors of the machine per thread: the others compute
_FEW_BYTES = 1 << 18  # below this, a compiled kernel or a thread is not worth its call
_FREE_BYTES = 1 << 17  # a segment of so many is long enough for xxhash to let the GIL go
_BYTES_EACH = 4 << 20  # below this, waking a thread costs more than it does


def checksums(memory: NDArray[np.uint8], size: int, chosen: NDArray[np.int64]) -> Sums:
    """Return the xxh3_64 checksums of some segments, uint64 [chosen]. memory: segments of `size` bytes back to back.
    chosen: their indices. Any thread may call it. Raises IndexError for a segment outside of the memory."""
    numbers: list[int] = chosen.tolist()  # a block is sealed every 32 tokens, layer by layer: microseconds count
    if numbers and not (min(numbers) >= 0 and (max(numbers) + 1) * size <= len(memory)):
        raise IndexError("there is no such segment")
    if len(numbers) * size < _FEW_BYTES:
        view = memory.data
        return np.array([xxh3_64_intdigest(view[n * size : (n + 1) * size]) for n in numbers], np.uint64)
    sums, starts, kernels = np.empty(len(chosen), np.uint64), chosen * size, _compiled()
    if kernels is None or size < kernels.MIN_BYTES or len(memory) % 2:
        add, stream = _add_sums, memory
        shares = 1 if size < _FREE_BYTES else _num_shares(sums.size * size)
    else:
        add, stream = kernels.add_sums, memory.view(np.uint16)
        shares = _num_shares(sums.size * size)
    cuts = [sums.size * share // shares for share in range(shares + 1)]
    first, *others = (slice(*cut) for cut in pairwise(cuts))
    helped = [_helpers().submit(add, stream, starts[span], size, sums[span]) for span in others]
    add(stream, starts[first], size, sums[first])
    for share in helped:
        share.result()
    return sums


def prepare() -> None:
    """Load the kernel that `checksums` uses, if any, compiling it at the first start, so that no request waits for that
    later."""
    _compiled()


def _add_sums(memory: NDArray[np.uint8], starts: NDArray[np.int64], size: int, sums: Sums) -> None:
    """Compute checksums as the compiled `add_sums` does, by xxhash's own code, where that kernel cannot be used."""
    view = memory.data
    sums[:] = [xxh3_64_intdigest(view[start : start + size]) for start in starts.tolist()]


@functools.cache
def _compiled() -> ModuleType | None:
    """Return the compiled kernels for CPUs, which take half a minute to compile the first time. None if there is a CUDA
    device: nothing else needs the kernels then, and for checksums alone xxhash is as fast, though it holds the GIL
    longer."""
    return None if torch.cuda.is_available() else load_kernels()


def _num_shares(num_bytes: int) -> int:
    return min(1 + _num_helpers(), max(1, num_bytes // _BYTES_EACH))


@functools.cache
def _num_helpers() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(_MOST_THREADS, usable // _PROCESSORS_EACH) - 1)


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_helpers(), thread_name_prefix="kv-checksum")
