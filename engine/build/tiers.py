"""The tiers below HBM, put together from an EngineConfig."""

import functools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cache.blocks.keys import BLOCK_TOKENS
from cache.blocks.stored import ExtentInfo, SessionRecord
from cache.policies import POLICIES
from cache.policies.eviction_policy import PolicyFactory
from cache.policies.lookahead import LookaheadPolicy
from cache.rates import Rates
from cache.storage.directory_lock import DirectoryLocked
from cache.storage.extent_format import record_key
from cache.storage.extent_store import ExtentStore
from cache.storage.first_touch import FirstTouch
from cache.storage.large_pages import LargePages
from cache.storage.slab import LayerShape, Slab
from cache.storage.throttle import Throttle
from cache.transfer.transfer import Transfer
from engine.build.resources import memory
from engine.build.sizes import Sizes
from engine.config import EngineConfig
from engine.model.loading import ModelRefused
from engine.model.probe import ProbeResult
from engine.model.rotations import ModelRotations
from kernels.attention.ragged_batch import KvPages

log = logging.getLogger(__name__)

_LEAST_STAGING_SLOTS = 16  # of automatic staging: some for each of those who read, write and compute
_MAX_DRAM_SHARE = 0.8  # of all memory
_BACKLOG_BYTES = 256 << 20  # of steps whose KV is not saved yet
_GB = 1e9
# Guesses until the first transfers were measured; wrong ones cost one load or one recompute.
_PRIOR_BYTES_PER_S = {
    "dram_to_hbm": 4e9,
    "disk_to_hbm": 1.5e9,
    "disk_to_dram": 1.5e9,
    "hbm_to_dram": 4e9,
    "dram_to_disk": 5e8,
}
_PRIOR_TRANSFER_S, _PRIOR_STEP_S, _PRIOR_PREFILL_FLOPS = 0.003, 0.005, 4e11


@dataclass(frozen=True, slots=True)
class Tiers:
    """What `build` composes the cache and the engine from."""

    num_slots: int
    dram_slots: int
    disk_bytes: int
    rates: Rates
    transfer: Transfer
    first_touch: FirstTouch
    extents: Sequence[ExtentInfo]
    records: Sequence[SessionRecord]

    def arrived(self, job_id: int) -> float:
        """The share of a load that is in HBM."""
        return self.transfer.layers_arrived(job_id) / self.rates.num_layers


def build_tiers(
    config: EngineConfig,
    probed: ProbeResult,
    dtype: torch.dtype,
    pages: Sequence[KvPages],
    fingerprint: bytes,
    parameters: int,
    sizes: Sizes,
) -> Tiers:
    """Allocate DRAM, open the disk directory, start the threads. sizes: of what the config leaves open. Raises
    ModelRefused."""
    shapes = [LayerShape(s.kv_heads, s.k_dim, s.v_dim) for s in probed.shapes]
    slot_bytes = sum(BLOCK_TOKENS * s.kv_heads * (s.k_dim + s.v_dim) * dtype.itemsize for s in shapes)
    dram_slots, disk_bytes, staging = 0, 0, 0
    if config.cache.mode == "attentionstore":
        dram_slots = (sizes.dram if config.cache.dram_bytes is None else config.cache.dram_bytes) // slot_bytes
        disk_bytes = sizes.disk if config.cache.disk_bytes is None else config.cache.disk_bytes
    if dram_slots or disk_bytes:
        staging = config.cache.staging_bytes // slot_bytes or max(_LEAST_STAGING_SLOTS, sizes.staging // slot_bytes)
    _check_memory((dram_slots + staging) * slot_bytes)
    slab = Slab(shapes=shapes, dtype=dtype, num_slots=dram_slots + staging, pinned=pages[0].k.is_cuda)
    disk: ExtentStore | None = None
    extents: Sequence[ExtentInfo] = ()
    records: Sequence[SessionRecord] = ()
    if disk_bytes:
        disk = ExtentStore(
            directory=Path(config.cache.disk_dir),
            fingerprint=fingerprint,
            segment_bytes=slab.segment_bytes,
            key=record_key(config.tenant_secret),
            capacity_bytes=disk_bytes,
            min_free_bytes=config.cache.disk_min_free_bytes,
            read_bytes_per_s=config.cache.disk_gbps * _GB,
            write_bytes_per_s=config.cache.disk_gbps * _GB,
            deadline_s=config.cache.io_deadline_s,
            owner=f"a running server (pid {os.getppid()})",  # who is to be stopped is the app, not its engine
        )
        try:
            extents, records = disk.open()
        except DirectoryLocked as error:
            raise ModelRefused(f"{error}; stop it, or give this server another cache.disk_dir") from error
        except OSError as error:
            raise ModelRefused(f"the cache directory {config.cache.disk_dir} cannot be used: {error}") from error
        log.debug("disk: %d extents, %d sessions found", len(extents), len(records))
    transfer = Transfer(
        pages=pages,
        slab=slab,
        disk=disk,
        rotations=functools.partial(ModelRotations, ropes=probed.ropes),
        read_buffer_layers=config.cache.read_buffer_layers,
        dram_throttle=Throttle(bytes_per_s=config.cache.dram_gbps * _GB, clock=time.monotonic, sleep=time.sleep),
        save_throttle=Throttle(bytes_per_s=config.cache.dram_gbps * _GB, clock=time.monotonic, sleep=time.sleep),
        synchronous=config.cache.sync_save,
        max_backlog_bytes=_BACKLOG_BYTES,
    )
    rates = Rates(
        num_layers=len(shapes),
        step_fixed_s=_PRIOR_STEP_S,
        prefill_s_per_token=2 * parameters / _PRIOR_PREFILL_FLOPS,
        transfer_fixed_s=_PRIOR_TRANSFER_S,
        bytes_per_s=_PRIOR_BYTES_PER_S,
    )
    return Tiers(
        num_slots=slab.num_slots,
        dram_slots=dram_slots,
        disk_bytes=disk_bytes,
        rates=rates,
        transfer=transfer,
        first_touch=FirstTouch(pages=pages, slab=slab, large_pages=None if pages[0].k.is_cuda else LargePages()),
        extents=extents,
        records=records,
    )


def policy_factory(name: str, granularity: str) -> PolicyFactory:
    """A new policy per tier."""
    if name == "lookahead" and granularity == "block":
        return lambda returns: LookaheadPolicy(returns, granularity="block")
    return POLICIES[name]


def _check_memory(num_bytes: int) -> None:
    """A size that somebody set is theirs to know, up to what can never be: what is free now may change."""
    total = memory().total
    if num_bytes > _MAX_DRAM_SHARE * total:
        raise ModelRefused(
            f"cache.dram_gib with its staging slots asks for {num_bytes / 2**30:.1f} GiB, "
            f"{total / 2**30:.1f} GiB is all the memory there is"
        )
