"""Computes the checksums of many segments at once: without the GIL, and where processors are to spare on several
threads."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from reprise.kernels.cpu.available import load_kernels

Sums = NDArray[np.uint64]
_MOST_THREADS = 4
_PROCESSORS_EACH = 4  # of the machine, for every thread: the others compute
_FEW_BYTES = 1 << 18  # below this, the compiled kernel is not worth its call
_BYTES_EACH = 4 << 20  # below this, waking a thread costs more than it does


def checksums(memory: NDArray[np.uint8], size: int, chosen: NDArray[np.int64]) -> Sums:
    """Return the xxh3_64 of some segments, uint64 [chosen]. memory: segments of `size` bytes back to back. Any thread
    may call it. Raises IndexError for a segment that there is not."""
    numbers: list[int] = chosen.tolist()  # a block is sealed every 32 tokens, layer by layer: microseconds count
    if numbers and not (min(numbers) >= 0 and (max(numbers) + 1) * size <= len(memory)):
        raise IndexError("there is no such segment")
    kernels = load_kernels() if len(numbers) * size >= _FEW_BYTES else None
    if kernels is None or size < kernels.MIN_BYTES or len(memory) % 2:
        view = memory.data
        return np.array([xxh3_64_intdigest(view[n * size : (n + 1) * size]) for n in numbers], np.uint64)
    sums, starts, words = np.empty(len(chosen), np.uint64), chosen * size, memory.view(np.uint16)
    shares = min(1 + _num_helpers(), max(1, sums.size * size // _BYTES_EACH))
    if shares == 1:
        kernels.add_sums(words, starts, size, sums)
        return sums
    cuts = [sums.size * share // shares for share in range(shares + 1)]
    spans = [slice(*cut) for cut in pairwise(cuts)]
    helped = [_helpers().submit(kernels.add_sums, words, starts[span], size, sums[span]) for span in spans[1:]]
    kernels.add_sums(words, starts[spans[0]], size, sums[spans[0]])
    for share in helped:
        share.result()
    return sums


@functools.cache
def _num_helpers() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(_MOST_THREADS, usable // _PROCESSORS_EACH) - 1)


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_helpers(), thread_name_prefix="kv-checksum")
