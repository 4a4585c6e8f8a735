"""Makes all tiers of an engine (HBM, DRAM, disk, Redis) from an EngineConfig."""

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.stored import ExtentInfo, SessionRecord
from reprise.cache.rates import Rates
from reprise.cache.storage.directory_lock import DirectoryLocked
from reprise.cache.storage.extent_format import ExtentForm, SegmentSizes, record_key
from reprise.cache.storage.extent_store import ExtentStore, Kept
from reprise.cache.storage.first_touch import FirstTouch
from reprise.cache.storage.redis.extents import RedisExtents
from reprise.cache.storage.slab import CodedSlab, LayerShape, Slab, row_segments
from reprise.cache.tiers.dram import split_dram
from reprise.cache.transfer.redis.streams import RedisStreams
from reprise.cache.transfer.stores import Links, Stores
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.build.link import decoding, link_rates
from reprise.engine.build.model import LoadedModel, ProbedModel, dram_link
from reprise.engine.build.resources import disk_room, memory
from reprise.engine.build.room import Room
from reprise.engine.build.sizes import DISK_SHARE, Sizes
from reprise.engine.codec.activation import KvProjection
from reprise.engine.config import EngineConfig
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.pages import make_pages
from reprise.engine.model.rotations import ModelRotations
from reprise.engine.ranks.names import rank_directory, rank_fingerprint
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.checksums import prepare

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # longest wait of a start for the disk; then it goes on without it
_LEAST_STAGING_SLOTS = 16  # least automatic staging: some slots for reads, writes and computed blocks each
_MAX_DRAM_SHARE = 0.8  # largest share of all memory
_BACKLOG_BYTES = 256 << 20  # most KV of steps that is not saved yet
_GB = 1e9
# Guesses until the first transfers were measured; wrong ones cost one load or one recompute. On CUDA the link, and what
# the device decodes, are measured at the start.
_PRIOR_BYTES_PER_S = {
    "dram_to_hbm": 4e9,
    "coded_to_hbm": 5e8,
    "disk_to_hbm": 1.5e9,
    "redis_to_hbm": 1e9,
    "disk_to_dram": 1.5e9,
    "redis_to_dram": 1e9,
    "hbm_to_dram": 4e9,
    "dram_to_disk": 5e8,
    "disk_to_redis": 5e8,
}
_FROM_CODED = ("coded_to_hbm", "disk_to_hbm", "redis_to_hbm")
_PRIOR_TRANSFER_S, _PRIOR_STEP_S, _PRIOR_PREFILL_FLOPS = 0.003, 0.005, 4e11


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memory for KV, and the parts that move KV between the tiers."""

    pages: list[KvPages]  # pages of HBM, by layer
    num_slots: int  # DRAM slots for rows, including staging
    dram_slots: int
    coded_slots: int
    disk_bytes: int
    rates: Rates
    transfer: Transfer
    has_redis: bool
    first_touch: FirstTouch
    extents: Sequence[ExtentInfo]  # found on disk
    records: Sequence[SessionRecord]
    disk_problem: str | None  # why the disk is not used yet; None: it is, or there is none

    def arrived(self, job_id: int) -> float:
        """Return the share of a load, from 0 to 1, that is in HBM. job_id: the load's id."""
        return self.transfer.layers_arrived(job_id) / self.rates.num_layers


def build_tiers(
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    room: Room,
    make_transfer: Callable[..., Transfer] = Transfer,
) -> Tiers:
    """Allocate HBM and DRAM, open the disk directory, start the threads. Sizes count the bytes of all ranks together;
    the memory made is this rank's part. Raises ModelRefused."""
    cache, experiment, ropes = config.cache, config.experiment, probed.found.ropes
    on_gpu = loaded.device.type == "cuda"
    # The last page belongs to no context: graphs write rows to it that no request has asked for (`GraphRunner`).
    num_pages = room.num_pages + on_gpu
    pages = make_pages(probed.found.shapes, num_pages, probed.page_size, probed.pages.format, loaded.device)
    slot_bytes = BLOCK_TOKENS * probed.stored_bytes_per_token
    dram_bytes, staging_slots, disk_bytes = _lower_sizes(config, room.automatic, slot_bytes)
    _check_memory(dram_bytes + staging_slots * slot_bytes)
    codec = probed.codec.codec
    shapes = _stored_shapes(probed)
    segment_bytes = row_segments(shapes, loaded.dtype)
    disk: ExtentStore | None = None
    found: Kept | None = [], []
    disk_problem = None
    if disk_bytes:
        measure = None if room.disk_is_known else functools.partial(_automatic_disk, config)
        disk = _disk(config, loaded, probed, segment_bytes, disk_bytes, measure)
        patience_s = min(_PATIENCE_S, config.experiment.io_deadline_s) if loaded.num_ranks == 1 else None
        found = _opened(disk, cache.disk_dir, patience_s)
        disk_problem = None if found is not None else disk.problem or "it has just begun to answer"
        disk_bytes = disk.capacity_bytes * loaded.num_ranks if measure is not None else disk_bytes
    extents, records = found or ((), ())
    coded_bytes = 0 if probed.codec.is_refused else sum(probed.coded_segment_bytes or ())
    dram_slots, coded_slots = split_dram(dram_bytes, slot_bytes, coded_bytes, mean_session_blocks(extents))
    slab = Slab(
        shapes=shapes,
        dtype=loaded.dtype,
        num_slots=dram_slots + staging_slots,
        pinned=on_gpu,
        projection=probed.codec.projection,
    )
    if slab.num_slots:
        prepare()
    coded = None if codec is None else CodedSlab(codec, num_slots=coded_slots, decodes=probed.codec.decodes)
    redis = _redis(config, probed, segment_bytes) if slab.num_slots else None
    transfer = make_transfer(
        pages=pages,
        stores=Stores(slab, coded, disk, None if redis is None else functools.partial(RedisStreams, redis)),
        rotations=functools.partial(ModelRotations, ropes=ropes),
        read_buffer_layers=experiment.read_buffer_layers,
        links=Links(load=loaded.link, save=dram_link(experiment, loaded.num_ranks)),
        synchronous=experiment.sync_save,
        max_backlog_bytes=_BACKLOG_BYTES,
    )
    measured = link_rates(loaded.device, transfer.compute, most_gbps=experiment.dram_gbps) if on_gpu else {}
    decoded = None if coded is None else decoding(coded, slab, transfer.compute)
    fixed_s: dict[str, float] = {}
    if decoded is not None:
        cap = experiment.dram_gbps * _GB / probed.coded_bytes or float("inf")
        measured["coded_to_hbm"] = min(decoded.bytes_per_s, cap)
        # Most blocks on disk and in Redis are coded too.
        fixed_s = dict.fromkeys(_FROM_CODED, _PRIOR_TRANSFER_S + decoded.fixed_s)
    rates = Rates(
        num_layers=slab.num_layers,
        step_fixed_s=_PRIOR_STEP_S,
        prefill_s_per_token=2 * loaded.parameters / _PRIOR_PREFILL_FLOPS,
        transfer_fixed_s=_PRIOR_TRANSFER_S,
        bytes_per_s=_expected_bytes_per_s(_PRIOR_BYTES_PER_S | measured, probed.codec.projection),
        fixed_s=fixed_s,
    )
    return Tiers(
        pages=pages,
        num_slots=slab.num_slots,
        dram_slots=dram_slots,
        coded_slots=coded_slots,
        disk_bytes=disk_bytes,
        rates=rates,
        transfer=transfer,
        has_redis=redis is not None,
        first_touch=FirstTouch(pages=pages, slab=slab),
        extents=extents,
        records=records,
        disk_problem=disk_problem,
    )


def mean_session_blocks(extents: Sequence[ExtentInfo]) -> float:
    """Return the mean number of blocks of a session on disk; 0 if `extents` is empty. extents: the files that earlier
    turns have left on disk. A session counts with its full blocks and one block that is not full, even if its turns
    have left several of the latter on disk."""
    full = Counter[tuple[str, str, str]]()
    for extent in extents:
        full[extent.session.names] += sum(not block.is_open for block in extent.blocks)
    return sum(full.values()) / len(full) + 1 if full else 0.0


def _stored_shapes(probed: ProbedModel) -> list[LayerShape]:
    if probed.codec.projection is not None:
        return [LayerShape(1, width, 0) for width in probed.codec.projection.widths]
    return [LayerShape(s.kv_heads, s.k_dim, s.v_dim) for s in probed.found.shapes]


def _expected_bytes_per_s(rates: dict[str, float], projection: KvProjection | None) -> dict[str, float]:
    """Return the rates, in bytes per second, at which transfers are priced until some were measured. rates: those of
    the links. projection: if given, loads also take the time in which activations become K and V."""
    if projection is None:
        return rates
    projecting = projection.flops_per_token / projection.bytes_per_token / _PRIOR_PREFILL_FLOPS
    return {name: 1 / (1 / rate + projecting) if name.endswith("_to_hbm") else rate for name, rate in rates.items()}


def _lower_sizes(config: EngineConfig, automatic: Sizes, slot_bytes: int) -> tuple[int, int, int]:
    """Return (bytes of DRAM, number of additional slots for blocks that are only on their way to disk, bytes of disk).
    automatic: the sizes where a setting names none; slot_bytes: size of a DRAM slot."""
    cache, staging_bytes = config.cache, config.experiment.staging_bytes
    if cache.mode != "attentionstore":
        return 0, 0, 0
    dram_bytes = automatic.dram if cache.dram_bytes is None else cache.dram_bytes
    dram_bytes -= dram_bytes % slot_bytes
    disk_bytes = automatic.disk if cache.disk_bytes is None else cache.disk_bytes
    if not (dram_bytes or disk_bytes):
        return 0, 0, 0
    staging = staging_bytes // slot_bytes or max(_LEAST_STAGING_SLOTS, automatic.staging // slot_bytes)
    return dram_bytes, staging, disk_bytes


def _disk(
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    segment_bytes: Sequence[int],
    capacity_bytes: int,
    measure: Callable[[], int] | None,
) -> ExtentStore:
    cache, experiment, num_ranks = config.cache, config.experiment, loaded.num_ranks
    return ExtentStore(
        directory=Path(rank_directory(cache.disk_dir, loaded.rank)),
        form=_form(rank_fingerprint(probed.fingerprint, loaded.rank, num_ranks), config, probed, segment_bytes),
        capacity_bytes=capacity_bytes // num_ranks,
        min_free_bytes=cache.disk_min_free_bytes,
        read_bytes_per_s=experiment.disk_gbps / num_ranks * _GB,
        write_bytes_per_s=experiment.disk_gbps / num_ranks * _GB,
        deadline_s=experiment.io_deadline_s,
        owner=f"a running server (pid {os.getppid()})",  # the process to stop is the app, not its engine
        measure=measure,
    )


def _form(fingerprint: bytes, config: EngineConfig, probed: ProbedModel, segment_bytes: Sequence[int]) -> ExtentForm:
    coded = probed.coded_segment_bytes
    sizes = SegmentSizes(tuple(segment_bytes), None if coded is None else tuple(coded))
    return ExtentForm(fingerprint, sizes, record_key(config.tenant_secret))


def _redis(config: EngineConfig, probed: ProbedModel, segment_bytes: Sequence[int]) -> RedisExtents | None:
    """Make the Redis tier; None if it is off. Does not connect: whether a server answers shows at the first use. Raises
    ModelRefused for an invalid URL."""
    cache = config.cache
    if not (cache.redis_urls and cache.redis_bytes):
        return None
    try:
        return RedisExtents(
            urls=cache.redis_urls,
            form=_form(probed.fingerprint, config, probed, segment_bytes),
            capacity_bytes=cache.redis_bytes,
            ttl_s=cache.ttl_s,
            deadline_s=config.experiment.io_deadline_s,
        )
    except ValueError as error:
        raise ModelRefused(f"cache.redis_url: {error}") from error


def _automatic_disk(config: EngineConfig) -> int:
    """Return the automatic size of the disk tier. Raises OSError."""
    return int(DISK_SHARE * disk_room(Path(config.cache.disk_dir), config.cache.disk_min_free_bytes))


def _opened(disk: ExtentStore, directory: str, patience_s: float | None) -> Kept | None:
    """Open the disk and return the extents and sessions that it has kept; None if it does not answer within
    `patience_s` seconds in all, or fails: it is taken when it answers. patience_s: None for a rank of several, whose
    extents count only if all ranks have them: it waits for the disk as long as each step of that is in time, and
    without the disk there is no engine. Raises ModelRefused."""
    try:
        found = disk.open() if patience_s is None else disk.open_in_time(patience_s)
    except DirectoryLocked as error:
        raise ModelRefused(f"{error}; stop it, or give this server another cache.disk_dir") from error
    except OSError as error:
        raise ModelRefused(f"the cache directory {directory} cannot be used: {error}") from error
    if found is not None:
        extents, records = found
        log.debug("disk: %d extents, %d sessions found", len(extents), len(records))
    return found


def _check_memory(num_bytes: int) -> None:
    """Refuse sizes of DRAM that the machine can never have. Sizes above the memory that is free now are accepted,
    because that may change."""
    total = memory().total
    if num_bytes > _MAX_DRAM_SHARE * total:
        raise ModelRefused(
            f"cache.dram_gib with its staging slots asks for {num_bytes / 2**30:.1f} GiB, "
            f"{total / 2**30:.1f} GiB is all the memory there is"
        )
