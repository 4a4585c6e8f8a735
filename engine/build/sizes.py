"""Chooses the sizes of tiers that the settings leave open, as shares of the memory that machine and model leave free.
Pure.

docs/sizes.md has a table of the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.tiers.encoder import AT_ONCE

_GIB = 1 << 30
# Shares of the memory that the weights leave free, for all KV. The rest is for the system, cached files and programs
# started later. Page-locked memory is taken from the start, and its allocator may round up to twice as much.
_SHARE, _PINNED_SHARE = 0.5, 0.4
# Shares of the same memory. On CPU the pool of HBM lies in it too; it is small, as it is no faster than DRAM there.
_HBM_SHARE, _STAGING_SHARE = 0.15, 0.05
_DEVICE_SHARE = 0.85  # share of the accelerator's memory that the weights leave free
DISK_SHARE = 0.25
_ENCODING_STREAMS = 2  # encodings at once: one for DRAM, one for the disk
# Windows in HBM: two, and for small models as many as fit into memory that any machine can spare.
_HBM_WINDOWS, _HBM_LEAST_CAP = 2, 2 * _GIB
# Windows in staging: one is written to disk while another is computed, up to what a disk takes in some seconds.
_STAGING_WINDOWS, _STAGING_CAP = 2, 4 * _GIB
# Blocks of a tier: 8.4 M tokens, or as many as the table of blocks may hold in its share of memory; 2.7 KB for each was
# measured with sessions of eight blocks.
_MOST_BLOCKS, _TABLE_SHARE, _TABLE_BYTES = 1 << 18, 0.05, 2700
# Tokens of a context larger than HBM that are read at a time, and the least pages with which such a context gets on.
_RING_TOKENS = 512
LEAST_PAGES = 8  # besides those that first rows may have to be copied from


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the tiers in bytes."""

    hbm: int
    dram: int
    staging: int  # DRAM for blocks on their way to and from disk
    disk: int


def coding_bytes(segment_bytes: Sequence[int], coded_segment_bytes: Sequence[int] | None) -> int:
    """Return the most memory, in bytes, that compressing KV takes besides the tiers. KV for DRAM and KV for the disk
    may be compressed at once; each needs memory for the compressed blocks and for one layer of them before compression.
    segment_bytes: bytes of one uncompressed block, by layer. coded_segment_bytes: of one compressed block, by layer;
    None without a codec."""
    if coded_segment_bytes is None:
        return 0
    return _ENCODING_STREAMS * AT_ONCE * (sum(coded_segment_bytes) + max(segment_bytes))


def automatic_sizes(
    *,
    memory: int,
    device_memory: int | None,
    disk: int,
    weights: int,
    kv_bytes_per_token: int,
    window_tokens: int,
    hbm_tokens: int,
    stored_bytes_per_token: int | None = None,
    coding: int = 0,
) -> Sizes:
    """Return the sizes of the tiers that the settings leave open, for a model.

    memory: bytes that were available before the model was loaded. device_memory: bytes of the accelerator that the
    weights leave free; None if the model runs on the CPU. disk: the most bytes that cache files could take. weights:
    bytes of the machine's memory that the weights take. window_tokens: the context window. hbm_tokens: tokens that HBM
    has to hold by the settings, or 0. stored_bytes_per_token: bytes that a token takes below HBM; None: as many as in
    HBM. coding: the result of `coding_bytes`.
    """
    stored_bytes = kv_bytes_per_token if stored_bytes_per_token is None else stored_bytes_per_token
    on_cpu = device_memory is None
    free = max(0, memory - weights)
    window = window_tokens * kv_bytes_per_token
    if hbm_tokens:
        hbm = hbm_tokens * kv_bytes_per_token
    elif device_memory is None:
        hbm = min(int(_HBM_SHARE * free), max(_HBM_WINDOWS * window, _HBM_LEAST_CAP))
    else:
        hbm = int(_DEVICE_SHARE * device_memory)
    served = -(-min(window, hbm) // kv_bytes_per_token // BLOCK_TOKENS) * BLOCK_TOKENS * stored_bytes
    staging = min(_STAGING_WINDOWS * served, _STAGING_CAP, int(_STAGING_SHARE * free))
    dram = int(_SHARE * free) - hbm if on_cpu else int(_PINNED_SHARE * free)
    most = min(_MOST_BLOCKS, int(_TABLE_SHARE * memory) // _TABLE_BYTES) * BLOCK_TOKENS * stored_bytes
    return Sizes(
        hbm=hbm,
        dram=max(0, min(dram - staging - coding, most)),
        staging=staging,
        disk=min(int(DISK_SHARE * disk), most),
    )


def dram_warnings(dram_tokens: int, hbm_tokens: int, window_tokens: int) -> list[str]:
    """Return warnings for people if DRAM holds less than one context window, or less than HBM. Sizes in tokens."""
    if dram_tokens < window_tokens:
        why = f"one window of {window_tokens:,}: a conversation that fills it does not fit"
    elif dram_tokens < hbm_tokens:
        why = f"the {hbm_tokens:,} of HBM: little is kept there that HBM does not hold already"
    else:
        return []
    return [f"DRAM holds {dram_tokens:,} tokens, less than {why} (cache.dram_gib)"]


def parking_pages(num_pages: int, page_size: int) -> tuple[int, int]:
    """Return (ring, most): the number of HBM pages through which contexts larger than HBM are read, and the most other
    pages that one context larger than HBM may have: half of the pages outside the ring. The other half stays for
    requests that run beside it."""
    ring = max(1, min(_RING_TOKENS // page_size, num_pages // 8))
    return ring, (num_pages - ring) // 2
