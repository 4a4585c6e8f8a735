"""Measures how long calls take: on the device, and with all that the host does."""

import time
from collections.abc import Callable, Sequence
from statistics import mean, median

import torch

_SLEEP_CYCLES = 2_000_000  # about a millisecond, in which what is timed is queued before it begins


def device_ms(call: Callable[[], object], device: torch.device, repeats: int = 10, warm: int = 2) -> float:
    """Return the median milliseconds that the device takes for the work of one call; of the whole call if the device is
    not CUDA. warm: number of calls before the measured ones."""
    for _ in range(warm):
        call()
    if device.type != "cuda":
        return wall_ms(call, device, repeats, warm=0)
    taken: list[float] = []
    for _ in range(repeats):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        begun.record()
        call()
        done.record()
        torch.cuda.synchronize(device)
        taken.append(begun.elapsed_time(done))
    return round(median(taken), 4)


def wall_ms(call: Callable[[], object], device: torch.device, repeats: int = 7, warm: int = 1) -> float:
    """Return the median milliseconds of one call, from its start until the device has done the work that the call has
    queued. warm: calls before the measured ones."""
    taken = []
    for number in range(warm + repeats):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        if number >= warm:
            taken.append(1e3 * (time.perf_counter() - started))
    return round(median(taken), 4)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return count, median, mean, 95th percentile and largest; all but the first in milliseconds."""
    if not seconds:
        return {"n": 0}
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    named = {"ms": median(ordered), "mean": mean(ordered), "p95": p95, "max": ordered[-1]}
    return {"n": len(ordered), **{name: round(1e3 * value, 3) for name, value in named.items()}}


def gbps(num_bytes: float, ms: float) -> float:
    return round(num_bytes / ms / 1e6, 1)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
