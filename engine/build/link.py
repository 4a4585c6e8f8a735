"""Measures the link between memory and a device when the engine starts, so that the first loads are priced rightly."""

from itertools import pairwise

import torch

from cache.transfer.device_streams import DeviceStream

_BYTES = 64 << 20  # enough for the link to reach its pace, and a few milliseconds
_COPIES = 3


def link_rates(device: torch.device, stream: DeviceStream, *, most_gbps: float = 0.0) -> dict[str, float]:
    """Return direction -> bytes/s, of page-locked memory. stream: the calling thread's. most_gbps: what loads are held
    to; 0: to nothing."""
    on_host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    rates = {}
    for direction, target, source in (("dram_to_hbm", on_device, on_host), ("hbm_to_dram", on_host, on_device)):
        fences = [stream.fence()]
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
            fences.append(stream.fence())
        fences[-1].wait()
        times_s = [later.seconds_since(earlier) for earlier, later in pairwise(fences)]
        rates[direction] = min(_BYTES / max(1e-9, min(times_s)), most_gbps * 1e9 or float("inf"))
    return rates
