"""Measures the most that the card, its link and its host do: every later figure is a ratio to these."""

import ctypes
import glob
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from benchmarks.gpu_day.items import Asked, Item, Values
from benchmarks.gpu_day.timing import device_ms, gbps, wall_ms
from reprise.kernels.triton_kernels import triton_copies

GIB = 1 << 30
HEADS, DIM, BLOCK_ROWS, PAGE = 8, 128, 32, 64  # shape of an 8 B model's KV
_PIECES_KIB = (64, 128, 256, 1024)
_LAUNCHES = 1000


def open_section(asked: Asked) -> Asked:
    return asked


def items(asked: Asked) -> Sequence[Item]:
    everywhere = [
        Item("machine", 10, machine),
        Item("read", 15, read),
        Item("product", 10, product),
        Item("launch", 10, launch),
    ]
    on_gpu = [
        Item("graph launch", 10, graph_launch),
        Item("link", 15, link),
        Item("batched copies", 15, batched_copies),
        Item("kernel across the link", 20, kernel_across_the_link),
    ]
    return everywhere + (on_gpu if asked.on_gpu else [])


def machine(asked: Asked) -> Iterator[Values]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    found: dict[str, Any] = {"card": "none", "versions": versions, "python": platform.python_version()}
    found |= {"processors": psutil.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / GIB, 1)}
    if asked.on_gpu:
        import triton

        properties = torch.cuda.get_device_properties(asked.device)
        versions["triton"] = triton.__version__
        found |= {"card": properties.name, "device_gib": round(properties.total_memory / GIB, 1)}
    yield found


def read(asked: Asked) -> Iterator[Values]:
    """Measure the GB/s at which products with few rows read their weights, as decode steps do. Also measure a copy, of
    which bytes read and bytes written both count."""
    rows, width = (1 << 18, 4096) if asked.on_gpu else (1 << 10, 256)
    weights = torch.randn(rows, width, device=asked.device, dtype=torch.bfloat16)
    for count in (1, 8, 32, 64):
        x = torch.randn(count, width, device=asked.device, dtype=torch.bfloat16)
        taken = device_ms(lambda: torch.nn.functional.linear(x, weights), asked.device)  # noqa: B023
        yield {"rows": count, "gbps": gbps(weights.nbytes, taken)}
    target = torch.empty_like(weights)
    yield {"copy_gbps": gbps(2 * weights.nbytes, device_ms(lambda: target.copy_(weights), asked.device))}


def product(asked: Asked) -> Iterator[Values]:
    width = 8192 if asked.on_gpu else 256
    a, b = (torch.randn(width, width, device=asked.device, dtype=torch.bfloat16) for _ in range(2))
    yield {"tflops": round(2 * width**3 / device_ms(lambda: a @ b, asked.device) / 1e9, 2)}


def launch(asked: Asked) -> Iterator[Values]:
    small = torch.zeros(16, device=asked.device)

    def many() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1)

    yield {"us": round(1e3 * wall_ms(many, asked.device) / _LAUNCHES, 3)}


def graph_launch(asked: Asked) -> Iterator[Values]:
    small = torch.zeros(16, device=asked.device)
    small.add_(1)
    for launches in (1, _LAUNCHES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                small.add_(1)
        yield {"launches": launches, "us": round(1e3 * wall_ms(graph.replay, asked.device, 20), 2)}


def link(asked: Asked) -> Iterator[Values]:
    """Measure GB/s of copies of one GiB between host and device, each way and both ways at once."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=asked.device)
    yield {
        "way": "to the device",
        "gbps": gbps(GIB, device_ms(lambda: there.copy_(host, non_blocking=True), asked.device, 3)),
    }
    yield {"way": "back", "gbps": gbps(GIB, device_ms(lambda: host.copy_(there, non_blocking=True), asked.device, 3))}
    side, half = torch.cuda.Stream(asked.device), GIB // 2

    def both() -> None:
        with torch.cuda.stream(side):
            host[half:].copy_(there[half:], non_blocking=True)
        there[:half].copy_(host[:half], non_blocking=True)

    yield {"way": "both", "gbps": gbps(GIB, wall_ms(both, asked.device, 3))}


def batched_copies(asked: Asked) -> Iterator[Values]:
    """Measure GB/s of scattered pieces that one call of `cudaMemcpyBatchAsync` copies. This shows the copy engines
    without the time that Python takes for each call."""
    copy_batch = _batched()
    host = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=asked.device)
    for kib in _PIECES_KIB:
        piece = kib << 10
        order = np.random.default_rng(0).permutation(host.numel() // piece).astype(np.uint64)
        source = np.uint64(host.data_ptr()) + order * np.uint64(piece)
        target = np.uint64(there.data_ptr()) + np.arange(len(order), dtype=np.uint64) * np.uint64(piece)
        lengths = np.full(len(order), piece, np.uint64)
        started = time.perf_counter()
        status = copy_batch(target, source, lengths)
        host_us = 1e6 * (time.perf_counter() - started) / len(order)
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync returned {status}")
        taken = device_ms(lambda: copy_batch(target, source, lengths), asked.device, 5)  # noqa: B023
        yield {"kib": kib, "gbps": gbps(host.nbytes, taken), "host_us_a_piece": round(host_us, 2)}


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_kind", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_kind", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def _batched() -> Any:
    """Return a function of target addresses, source addresses and lengths, on the current stream. It returns CUDA's
    status. Raises OSError without CUDA 13's runtime."""
    near = sorted(
        glob.glob(str(Path(torch.__file__).parent.parent / "nvidia" / "**" / "libcudart.so.13*"), recursive=True)
    )
    runtime = ctypes.CDLL(near[0] if near else "libcudart.so.13")

    def copy(target: np.ndarray, source: np.ndarray, lengths: np.ndarray) -> int:
        in_order, first = _CopyAttributes(1, 0, 0, 0, 0, 0), (ctypes.c_size_t * 1)(0)
        arrays = (ctypes.c_void_p(array.ctypes.data) for array in (target, source, lengths))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        of_all = ctypes.c_size_t(len(lengths)), ctypes.byref(in_order), first, ctypes.c_size_t(1)
        return int(runtime.cudaMemcpyBatchAsync(*arrays, *of_all, stream))

    return copy


def kernel_across_the_link(asked: Asked) -> Iterator[Values]:
    """Measure a kernel that copies one layer of 16,384 tokens from page-locked memory and rotates the keys on the way;
    also products with few rows beside it."""
    kernels: Any = triton_copies()
    device, count, elements = asked.device, 512, BLOCK_ROWS * HEADS * DIM * 2
    segments = torch.randn(count, elements).bfloat16().pin_memory()
    pools = torch.empty(2, count * BLOCK_ROWS // PAGE, PAGE, HEADS, DIM, device=device, dtype=torch.bfloat16)
    cos, sin = torch.randn(2, count * BLOCK_ROWS, DIM, device=device).bfloat16()
    number = torch.randperm(count)
    slots = torch.arange(count) * BLOCK_ROWS
    blocks = torch.stack((number * elements, torch.full_like(number, BLOCK_ROWS), slots, slots), 1).to(device)
    weights = [torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(20)]
    x, side = torch.randn(8, 4096, device=device, dtype=torch.bfloat16), torch.cuda.Stream(device)

    def products() -> None:
        for weight in weights * 4:
            torch.nn.functional.linear(x, weight)

    yield {"programs": 0, "products_ms": device_ms(products, device)}
    for programs in (8, 16, 32, 64):
        kernels._PROGRAMS = programs

        def cross() -> None:
            kernels.write_blocks(segments, blocks, cos, sin, *pools, BLOCK_ROWS)

        def beside() -> None:
            with torch.cuda.stream(side):
                for _ in range(3):
                    cross()
            products()

        alone = gbps(segments.nbytes, device_ms(cross, device))
        torch.cuda.synchronize(device)
        yield {"programs": programs, "gbps": alone, "products_ms": device_ms(beside, device, 5)}
