"""Defines the settings for benchmarks and tests alone: each turns a mechanism off to compare it, or stands for other
hardware.

They are in no list and no help; a server that has one says so when it starts.
"""

from typing import Literal

from pydantic import Field

from reprise.app.settings.sections import Section


class ExperimentSettings(Section):
    hbm_high_water: float = Field(
        1.0, ge=0, le=1, description="share of HBM in use above which saved KV leaves it in the background; 1: never"
    )
    hbm_low_water: float = Field(0.85, ge=0, le=1, description="until no more than this share is in use")
    scores: bool = Field(False, description="`car`: blocks that requests in the window or running need leave HBM last")
    window: int = Field(0, ge=0, le=1024, description="`car`: places of the window; 0: from HBM and the mean session")
    chunked_prefill: bool = Field(True, description="spread long prompts over several steps")
    truncation_mode: Literal["decoupled", "recompute"] = Field(
        "decoupled", description="what stays of a full window: its KV at new positions; recomputed"
    )
    truncation_ratio: float = Field(0.5, gt=0, lt=1, description="share of the window that is dropped at once")
    read_buffer_layers: int = Field(
        -1, ge=-1, le=4096, description="layers loaded before a request's turn has come; -1: all, 0: none"
    )
    sync_save: bool = Field(False, description="save KV before the next step, not during it")
    staging_mib: int = Field(
        0, ge=0, le=1 << 20, description="DRAM for KV on its way to and from disk, besides dram_gib; 0: automatic"
    )
    dram_gbps: float = Field(0.0, ge=0, le=1e6, description="cap in GB/s that stands in for a slower link; 0: none")
    disk_gbps: float = Field(0.0, ge=0, le=1e6, description="the same for reads and writes of the disk; 0: none")
    io_deadline_s: float = Field(5.0, gt=0, le=3600, description="a read or write that takes longer has failed")
