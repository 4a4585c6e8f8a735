"""Whether the compiled kernels can run here, and what they are given."""

import functools
import importlib
import logging
import os
import platform
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

log = logging.getLogger(__name__)


@functools.cache
def announce_compiling() -> None:
    """Say so when numba compiles something that it has not kept from an earlier start: that takes half a minute."""
    from numba.core import event

    class Announcer(event.Listener):
        def on_start(self, event: object) -> None:
            if not said:
                said.append(True)
                log.info("compiling kernels for this machine, once")

        def on_end(self, event: object) -> None:
            pass

    said: list[bool] = []
    event.register("numba:compile", Announcer())


@functools.cache
def decode_kernels() -> ModuleType | None:
    """`kernels.cpu.decode`, or None where it cannot run: no numba, no AVX-512, no OpenMP that torch and numba share."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx512_supported():
        return None
    threads = torch.get_num_threads()
    try:
        from numba import config

        announce_compiling()
        # torch's pool of threads; two pools that wait for work by spinning would take the cores from one another.
        config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]
        module = importlib.import_module("kernels.cpu.decode")
        _test(module)
    except Exception as error:  # a numba that does not fit its numpy or its machine fails in many ways
        log.info("decoding without compiled kernels: %s", error)
        return None
    finally:
        # numba, as it starts, tells OpenMP to use every processor: more than was asked for, or than there are cores.
        torch.set_num_threads(threads)
    return module


@functools.cache
def prefill_kernels() -> ModuleType | None:
    """`kernels.cpu.prefill`, or None where it cannot run: not without the kernels of decode."""
    if decode_kernels() is None:
        return None
    try:
        module = importlib.import_module("kernels.cpu.prefill")
        module.self_test()
    except Exception as error:
        log.info("prefill without compiled kernels: %s", error)
        return None
    return module


@functools.cache
def flash_kernels(exact: bool) -> ModuleType | None:
    """`kernels.cpu.flash`, or None where it cannot run, which takes dot products of bf16 pairs, or should not: with
    AMX torch's own attention multiplies tiles of bf16 and is faster, but not exact."""
    if decode_kernels() is None:
        return None
    try:
        if not _dots_of_pairs() or (torch.cpu._is_amx_tile_supported() and not exact):
            return None
        module = importlib.import_module("kernels.cpu.flash")
        module.self_test()
    except Exception as error:
        log.info("attention of many rows without compiled kernels: %s", error)
        return None
    return module


@functools.cache
def product_kernels() -> ModuleType | None:
    """`kernels.cpu.products`, or None where it cannot run, which takes dot products of bf16 pairs."""
    if decode_kernels() is None:
        return None
    try:
        if not _dots_of_pairs():
            return None
        module = importlib.import_module("kernels.cpu.products")
        module.self_test(tiles_of_pairs())
    except Exception as error:
        log.info("products without kernels of one order: %s", error)
        return None
    return module


def _dots_of_pairs() -> bool:
    """Whether the processor has AVX512_BF16 and numba compiles for it: if it did not, LLVM would end the process."""
    return torch.cpu._is_avx512_bf16_supported() and "+avx512bf16" in _features()


@functools.cache
def tiles_of_pairs() -> bool:
    """Whether AMX may be used here, which the kernel of the system has to grant, and numba compiles for it."""
    known = {"+amx-tile", "+amx-bf16"} <= _features()
    return known and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def _features() -> set[str]:
    """Of the processor that numba compiles for."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return set(features.split(","))


def _test(module: ModuleType) -> None:
    """Raises if the kernels are wrong, or if their threads are not torch's."""
    use_torch_threads()
    torch.ones(1 << 20).sum()  # starts torch's threads
    before = len(os.listdir("/proc/self/task"))
    module.self_test()
    if len(os.listdir("/proc/self/task")) > before:
        raise RuntimeError("torch and numba run threads of their own")


def use_torch_threads() -> None:
    """Let numba use as many threads as torch does, in this thread's calls."""
    from numba import config, set_num_threads

    set_num_threads(min(torch.get_num_threads(), config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def split_contexts(contexts: Sequence[int], window: int | None, part: int) -> tuple[np.ndarray, ...]:
    """The tasks of attention of single rows, each of at most `part` keys: for every task its row, its first key and its
    keys, and where each row's tasks begin [rows + 1]. How a row is split depends on its own context alone."""
    last = np.asarray(contexts, dtype=np.int64)
    begin = np.zeros_like(last) if window is None else np.maximum(0, last - window)
    tasks = -(-(last - begin) // part)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(tasks)))
    row = np.repeat(np.arange(len(last)), tasks)
    first = begin[row] + (np.arange(starts[-1]) - starts[row]) * part
    return row, first, np.minimum(part, last[row] - first), starts
