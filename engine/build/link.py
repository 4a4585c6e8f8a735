"""Measures the link between memory and a device, and how fast the device decodes, when the engine starts: the first
loads are priced rightly."""

from itertools import pairwise

import torch

from cache.storage.slab import CodedSlab, Slab
from cache.transfer.coding import Decoder
from cache.transfer.device_streams import DeviceStream

_BYTES = 64 << 20  # enough for the link to reach its pace, and a few milliseconds
_COPIES = 3
_DECODED_BLOCKS = 256  # a device takes as long for a few


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


def decoding_rate(coded: CodedSlab, slab: Slab, stream: DeviceStream) -> dict[str, float]:
    """Return "coded_to_hbm" -> bytes/s of the rows that become of coded blocks; nothing where processors decode.
    stream: the calling thread's."""
    if coded.decodes.device.type == "cpu" or not slab.num_slots:
        return {}
    decoder = Decoder(coded.decodes, slab, _DECODED_BLOCKS)
    segments = torch.zeros(_DECODED_BLOCKS, coded.segment_bytes[0], dtype=torch.uint8)
    fences = [stream.fence()]
    try:
        for _ in range(_COPIES):
            decoder.decode(0, segments, together=False)
            fences.append(stream.fence())
    except torch.OutOfMemoryError:
        return {}
    fences[-1].wait()
    times_s = [later.seconds_since(earlier) for earlier, later in pairwise(fences)]
    return {"coded_to_hbm": decoder.raw.nbytes / max(1e-9, min(times_s))}
