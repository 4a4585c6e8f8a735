"""Finds out which compiled kernels can run here, and on which threads."""

import functools
import importlib
import logging
import os
import platform
from types import ModuleType

import torch

log = logging.getLogger(__name__)

_NOWHERE_TO_KEEP = (
    "compiling kernels for this machine, as at every start: neither the installed files nor the user's cache directory"
    " can be written, so they cannot be kept. Set NUMBA_CACHE_DIR to a directory that can"
)


@functools.cache
def announce_compiling() -> None:
    """Make this process log one message when numba first compiles a function that is not in its cache, because that
    takes half a minute, or minutes on a busy machine. Without a directory for the cache, numba compiles at every
    start."""
    from numba.core import event

    class Announcer(event.Listener):
        def on_start(self, event: object) -> None:
            if not said:
                said.append(True)
                if importlib.import_module("reprise.kernels.cpu.emit").keeps_compiled():
                    log.info("compiling kernels for this machine, once")
                else:
                    log.warning(_NOWHERE_TO_KEEP)

        def on_end(self, event: object) -> None:
            pass

    said: list[bool] = []
    event.register("numba:compile", Announcer())


@functools.cache
def decode_kernels() -> ModuleType | None:
    """Return `reprise.kernels.cpu.decode`, or None if it cannot run: without numba, AVX2, or an OpenMP that torch and
    numba share."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx2_supported():
        return None
    threads = torch.get_num_threads()
    try:
        from numba import config

        announce_compiling()
        # Use torch's pool of threads. Two pools whose threads spin while they wait would take cores from each other.
        config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]
        module = importlib.import_module("reprise.kernels.cpu.decode")
        _test(module)
    except Exception as error:  # a numba that does not fit its numpy or its machine can fail in many ways
        log.info("decoding without compiled kernels: %s", error)
        return None
    finally:
        # At its start numba sets OpenMP to use every processor, which may be more than requested or than there are
        # cores.
        torch.set_num_threads(threads)
    return module


@functools.cache
def load_kernels() -> ModuleType | None:
    """Return `reprise.kernels.cpu.load`, or None if it cannot run: without numba, or without AVX2, where torch rounds
    differently. The first call compiles."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx2_supported():
        return None
    try:
        # Must come before numba chooses its threading layer. It starts a pool of threads, which slows torch down on a
        # processor without AVX-512 that computes in fp32, so there it is asked for by what needs it.
        is_wanted = torch.cpu._is_avx512_supported() or decode_kernels.cache_info().currsize > 0
        has_team = is_wanted and decode_kernels() is not None
        announce_compiling()
        module = importlib.import_module("reprise.kernels.cpu.load")
        module.self_test(has_team)
    except Exception as error:  # a numba that does not fit its numpy or its machine can fail in many ways
        log.info("loading without compiled kernels: %s", error)
        return None
    return module


@functools.cache
def prefill_kernels() -> ModuleType | None:
    """Return `reprise.kernels.cpu.prefill`, or None if it cannot run. It needs the decode kernels."""
    return None if decode_kernels() is None else _checked("prefill", "prefill without compiled kernels")


@functools.cache
def expert_kernels() -> ModuleType | None:
    """Return `reprise.kernels.cpu.experts`, or None if it cannot run. It needs the decode kernels."""
    return None if decode_kernels() is None else _checked("experts", "experts without compiled kernels")


@functools.cache
def select_kernels() -> ModuleType | None:
    """Return `reprise.kernels.cpu.select`, or None if it cannot run. It needs the decode kernels, and that numba
    compiles for AVX-512. If it did not, LLVM would end the process."""
    if not torch.cpu._is_avx512_supported() or decode_kernels() is None or "+avx512f" not in _features():
        return None
    return _checked("select", "attention to chosen rows without compiled kernels")


@functools.cache
def flash_kernels(exact: bool) -> ModuleType | None:
    """Return `reprise.kernels.cpu.flash`, or None if it cannot or should not run. It needs dot products of bf16 pairs.
    exact: whether results must have the same bits in every batch; if not, returns None with AMX, because torch's own
    attention then multiplies bf16 tiles and is faster."""
    if not dots_of_pairs() or (torch.cpu._is_amx_tile_supported() and not exact) or decode_kernels() is None:
        return None
    return _checked("flash", "attention of many rows without compiled kernels")


@functools.cache
def product_kernels() -> ModuleType | None:
    """Return `reprise.kernels.cpu.products`, or None if it cannot run. It needs dot products of bf16 pairs."""
    if not dots_of_pairs() or decode_kernels() is None:
        return None
    return _checked("products", "products without kernels of one order", tiles_of_pairs())


def _checked(name: str, without: str, *of_test: bool) -> ModuleType | None:
    """Import a module of kernels and run its check, with the arguments `of_test`. Returns None if either fails, and
    logs why. without: what the log says is done without it."""
    try:
        module = importlib.import_module(f"reprise.kernels.cpu.{name}")
        module.self_test(*of_test)
    except Exception as error:  # a numba that does not fit its numpy or its machine can fail in many ways
        log.info("%s: %s", without, error)
        return None
    return module


def dots_of_pairs() -> bool:
    """Return whether dot products of bf16 pairs can be compiled: the processor has AVX512_BF16 and numba compiles for
    it. If it did not, LLVM would end the process."""
    return torch.cpu._is_avx512_bf16_supported() and "+avx512bf16" in _features()


@functools.cache
def tiles_of_pairs() -> bool:
    """Return whether products of bf16 tiles can be compiled: the system kernel permits AMX and numba compiles for
    it."""
    known = {"+amx-tile", "+amx-bf16"} <= _features()
    return known and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def _features() -> set[str]:
    """Return the features of the processor that numba compiles for; none where numba is missing."""
    try:
        from numba.core.registry import cpu_target
    except ImportError:
        return set()
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return set(features.split(","))


def _test(module: ModuleType) -> None:
    """Raise if a module's kernels give wrong results, or if they use threads other than torch's."""
    use_torch_threads()
    torch.ones(1 << 20).sum()  # starts torch's threads
    before = len(os.listdir("/proc/self/task"))
    module.self_test()
    if len(os.listdir("/proc/self/task")) > before:
        raise RuntimeError("torch and numba run threads of their own")


def use_torch_threads() -> None:
    """Let numba use as many threads as torch does, in calls from the current thread."""
    from numba import config, set_num_threads

    set_num_threads(min(torch.get_num_threads(), config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
