"""Measures how fast memory is copied to and from a device, and how fast the device decodes stored KV, when the engine
starts, so that already the first loads are priced rightly."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.transfer.coding import Decoder
from reprise.cache.transfer.device_streams import DeviceStream
from reprise.kernels.device_errors import lacks_memory

_COPIED_BYTES = 64 << 20  # enough for the link to reach its pace, and a few milliseconds
_COPIES = 3
_DECODED_BLOCKS = 256  # a device takes as long for a few


def link_rates(device: torch.device, stream: DeviceStream, *, most_gbps: float = 0.0) -> dict[str, float]:
    """Return the measured bytes per second of copies between page-locked memory and the device, for each direction
    (`dram_to_hbm`, `hbm_to_dram`). stream: the device stream on which the calling thread's copies run. most_gbps: cap
    of the rates in 10^9 bytes per second; 0: none."""
    on_host = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    rates = {}
    for direction, target, source in (("dram_to_hbm", on_device, on_host), ("hbm_to_dram", on_host, on_device)):
        fences = [stream.fence()]
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
            fences.append(stream.fence())
        fences[-1].wait()
        times_s = [later.seconds_since(earlier) for earlier, later in pairwise(fences)]
        rates[direction] = min(_COPIED_BYTES / max(1e-9, min(times_s)), most_gbps * 1e9 or float("inf"))
    return rates


@dataclass(frozen=True, slots=True)
class Decoding:
    """The speed at which a device decodes blocks that a codec has compressed."""

    fixed_s: float  # time of any load, through all layers
    bytes_per_s: float  # further rows per second


def decoding(coded: CodedSlab, slab: Slab, stream: DeviceStream) -> Decoding | None:
    """Return how fast the device decodes blocks that the codec has compressed, from the time for one block and for many
    after a first run. Returns None where the CPU decodes, or if there is no memory for many blocks. stream: the device
    stream on which the calling thread decodes."""
    if coded.decodes.device.type == "cpu" or not slab.num_slots:
        return None
    times_s = []
    for count in (1, _DECODED_BLOCKS):
        decoder = Decoder(coded.decodes, slab, count)
        segments = torch.zeros(count, coded.segment_bytes[0], dtype=torch.uint8)
        fences = []
        try:
            for _ in range(1 + _COPIES):
                decoder.decode(0, segments, together=False)
                fences.append(stream.fence())
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None
        fences[-1].wait()
        times_s.append(min(later.seconds_since(earlier) for earlier, later in pairwise(fences)))
    one_s, many_s = times_s
    more_s = max(many_s - one_s, 0.1 * many_s, 1e-9)  # noise must not make it free
    more_bytes = (_DECODED_BLOCKS - 1) * slab.block_elements[0] * slab.dtype.itemsize
    return Decoding(fixed_s=one_s * slab.num_layers, bytes_per_s=more_bytes / more_s)
