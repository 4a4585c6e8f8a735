"""Defines the options of a cache as plain values, in which settings of `auto` are already resolved."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Truncation:
    """The server's rules for dropping history when the window is full (AttentionStore §3.4)."""

    window: int  # tokens a context may have
    ratio: float  # share of the window that is dropped at an overflow
    mode: str  # decoupled | recompute
    block_scorer: str  # a key of reprise.cache.policies.keep.BLOCK_SCORERS
    recall: bool  # whether what was dropped comes back where a new message is about it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The sizes of the tiers, and the rules for what stays in them."""

    num_pages: int  # pages of HBM
    page_size: int  # tokens of a page, a multiple of the block
    bytes_per_token: int  # bytes of a token's rows below HBM
    hbm_bytes_per_token: int | None  # bytes of a token's rows in HBM; None: the same
    prefer_contiguous: bool  # a context's pages lie in a row where that can be
    most_pages: int  # pages of a context that HBM cannot hold: the rest is parked in DRAM; 0: each has to fit
    num_slots: int  # DRAM slots, a block each; 0: there is nothing below HBM
    dram_slots: int  # how many of these keep blocks; the others are for what passes through
    disk_bytes: int  # 0: no disk
    coded_block_bytes: int  # size of a coded block; 0: nothing is coded
    coded_slots: int  # DRAM slots for coded blocks
    redis_bytes: int  # most that Redis may keep for all servers together
    head_key: bytes  # signs heads of sessions (`reprise.cache.blocks.head`); empty: no KV is kept in Redis
    hbm_high_water: float  # used share of the pages above which blocks that no request needs leave
    hbm_low_water: float  # used share of the pages down to which such blocks leave
    dram_free_buffer: float  # the share of `dram_slots` kept free where a disk has the blocks too
    reuse: bool  # False: nothing that was computed is found again
    only_as_computed: bool  # rows are saved by the step that computes them or never, not later out of a page
    truncation: Truncation
    session_ttl_s: float
    max_sessions: int
    unix_offset_s: float  # from the clock of `now` to Unix time
