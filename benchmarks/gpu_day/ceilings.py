"""What the card, its link and its host can do at most, and what is not known of the software on it."""

import platform
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor

from benchmarks.gpu_day.section import Asked, asked, seconds, wait
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages

GIB = 1 << 30
_COPIES = (1 << 16, 1 << 17, 1 << 20, 1 << 26)  # bytes


def measure(wanted: Asked) -> dict[str, Any]:
    device, on_gpu = wanted.device, wanted.on_gpu
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if on_gpu else "none",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda},
        "processor": platform.processor() or platform.machine(),
        "processors": psutil.cpu_count(),
        "MemTotal GiB": round(psutil.virtual_memory().total / GIB, 1),
    }
    if on_gpu:
        import triton

        result["versions"]["triton"] = triton.__version__
        result["device memory GiB"] = round(torch.cuda.get_device_properties(device).total_memory / GIB, 1)
    result["copy GB/s, read and written"] = round(_copy_gbps(device), 1)
    width = 8192 if on_gpu else 256
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    result["bf16 product TFLOP/s"] = round(2 * width**3 / seconds(lambda: a @ b, device, 10) / 1e12, 2)
    result["launch us"] = round(1e6 * _launch_s(device), 2)
    if on_gpu:
        result |= _link(device) | _graph(device)
    result["SDPA with sums"] = _sdpa(device)
    result["a layer's attention, ms"] = _prompts(device)
    return result


def _copy_gbps(device: torch.device) -> float:
    source = torch.randn((GIB if device.type == "cuda" else 1 << 24), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device) / 1e9


def _launch_s(device: torch.device) -> float:
    small = torch.zeros(16, device=device)

    def many() -> None:
        for _ in range(1000):
            small.add_(1)

    return seconds(many, device) / 1000


def _link(device: torch.device) -> dict[str, Any]:
    """GB/s between host and device by the size of one copy, registered memory and not, and both ways at once."""
    host = torch.empty(1 << 30, dtype=torch.uint8)
    host.fill_(1)
    started = time.perf_counter()
    status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)
    found: dict[str, Any] = {"registering GiB/s": round(1 / (time.perf_counter() - started), 2)}
    found["registered memory is pinned"] = f"status {int(status)}, is_pinned {host.is_pinned()}"
    there = torch.empty_like(host, device=device)
    for size in _COPIES:
        count = min(1 << 10, host.numel() // size)

        def copy(into: Tensor, out_of: Tensor, size: int = size, count: int = count) -> None:
            for start in range(0, count * size, size):
                into[start : start + size].copy_(out_of[start : start + size], non_blocking=True)

        gb = count * size / 1e9
        to_s = seconds(lambda: copy(there, host), device, 3)
        back_s = seconds(lambda: copy(host, there), device, 3)
        found[f"link GB/s in copies of {size >> 10} KiB"] = f"{gb / to_s:.1f} to the device, {gb / back_s:.1f} back"
    other, back = torch.cuda.Stream(device), torch.empty(1 << 28, dtype=torch.uint8, device=device)
    landing = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)

    def both() -> None:
        there[: 1 << 28].copy_(host[: 1 << 28], non_blocking=True)
        with torch.cuda.stream(other):
            landing.copy_(back, non_blocking=True)

    found["link GB/s both ways at once"] = round(2 * (1 << 28) / seconds(both, device) / 1e9, 1)
    pageable = torch.empty(1 << 28, dtype=torch.uint8).fill_(1)
    found["link GB/s, memory not registered"] = round(
        (1 << 28) / seconds(lambda: there[: 1 << 28].copy_(pageable), device, 3) / 1e9, 1
    )
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return found


def _graph(device: torch.device) -> dict[str, Any]:
    """What a launch costs inside a graph."""
    small = torch.zeros(16, device=device)
    small.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            small.add_(1)
    return {"launch us in a graph": round(1e3 * seconds(graph.replay, device), 3)}


def _sdpa(device: torch.device) -> dict[str, str]:
    """Which of torch's kernels return the log of the sums, with fewer KV heads than query heads, and how fast."""
    heads, kv_heads, rows = 32, 8, 4096 if device.type == "cuda" else 64
    q = torch.randn(1, heads, rows, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, rows, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    wide_k, wide_v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    calls: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "cudnn": lambda k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True),
        "flash": lambda k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        "sdpa": lambda k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }
    flops = 2 * 2 * heads * rows * rows * 128 / 2
    found = {}
    for name, call in calls.items():
        for kind, pair in {"grouped": (k, v), "repeated": (wide_k, wide_v)}.items():
            try:
                out = call(*pair)
                tflops = flops / seconds(lambda: call(*pair), device) / 1e12  # noqa: B023
                shape = f", sums {tuple(out[1].shape)}" if isinstance(out, tuple) else ""
                found[f"{name}, {kind}"] = f"{tflops:.2f} TFLOP/s{shape}"
            except (RuntimeError, NotImplementedError) as error:
                found[f"{name}, {kind}"] = f"no: {str(error).splitlines()[0][:120]}"
    return found


def _prompts(device: torch.device) -> dict[str, str]:
    """Rows behind a history: by torch's kernels, at a shape that is new to them and at one that is not, and by ours."""
    heads, kv_heads, dim, page_size = 32, 8, 128, 64
    found = {}
    for rows, history in (
        ((4096, 0), (2048, 26_000), (512, 27_500), (101, 28_000)) if device.type == "cuda" else ((8, 40),)
    ):
        context = rows + history
        num_pages = -(-context // page_size)
        q = torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16)
        pool = torch.randn(2, kv_heads, num_pages, page_size, dim, device=device, dtype=torch.bfloat16)
        k, v = pool.permute(0, 2, 3, 1, 4)
        table = torch.randperm(num_pages, device=device, dtype=torch.int32)[None]
        times = {}
        if device.type == "cuda":
            flat = (x.index_select(0, table[0]).flatten(0, 1).transpose(0, 1)[None] for x in (k, v))
            gathered = tuple(flat)
            times["gathering"] = seconds(lambda: k.index_select(0, table[0]), device)  # noqa: B023
            calls: dict[str, Callable[..., Any]] = {
                "cudnn": lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True),
                "flash": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v),
            }
            for name, call in calls.items():
                for shorter in range(3):
                    inputs = q.transpose(0, 1)[None], *(x[:, :, : context - shorter] for x in gathered)
                    wait(device)
                    started = time.perf_counter()
                    call(*inputs)
                    wait(device)
                    times[f"{name}, new shape {shorter}"] = time.perf_counter() - started
                times[name] = seconds(lambda: call(*inputs), device)  # noqa: B023
        backend = BACKENDS["triton" if device.type == "cuda" else "torch_cpu"]()
        meta = AttentionMeta(
            query_lens=[rows],
            context_lens=[context],
            query_start=torch.tensor([0, rows], device=device, dtype=torch.int32),
            context_len=torch.tensor([context], device=device, dtype=torch.int32),
            block_table=table,
            slots=torch.arange(rows, device=device),
        )
        params = AttentionParams(scale=dim**-0.5, window=None, softcap=None, sinks=None)
        times["ours"] = seconds(lambda: backend.forward(q, KvPages(k, v), meta, params), device)  # noqa: B023
        found[f"{rows} behind {history}"] = ", ".join(f"{name} {1e3 * taken:.3f}" for name, taken in times.items())
    return found


if __name__ == "__main__":
    request = asked()
    request.write(measure(request))
