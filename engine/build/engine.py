"""Composes an Engine from its EngineConfig. All automatic settings are resolved here, once."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from reprise.cache.blocks.keys import BLOCK_TOKENS, KeyDomain, typed_fields
from reprise.cache.manager import CacheManager
from reprise.cache.options import CacheOptions, Truncation
from reprise.cache.policies import POLICIES
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.requests.parking import chunk_pages
from reprise.engine.build.assemble import assemble
from reprise.engine.build.first_steps import WarmModel, warm_up
from reprise.engine.build.large_pages import move_into_large_pages
from reprise.engine.build.model import LoadedModel, ProbedModel, dram_link, load, probe_model
from reprise.engine.build.resources import memory
from reprise.engine.build.room import DRAM_FREE_BUFFER, Room, find_room
from reprise.engine.build.scheduler import build_scheduler
from reprise.engine.build.selector import build_selector
from reprise.engine.build.sizes import dram_warnings
from reprise.engine.build.tiers import Tiers, build_tiers
from reprise.engine.config import CacheConfig, EngineConfig
from reprise.engine.engine import Engine
from reprise.engine.messages import ModelInfo
from reprise.kernels.attention.watched import WatchedAttention


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A loaded and probed model that several engines of one process share; only one of them may run a step at a time.
    first_steps: the directory that keeps the results (`FirstSteps`: step times, exactness proof) of the trial steps at
    an engine's start."""

    loaded: LoadedModel
    probed: ProbedModel
    first_steps: Path


def build_engine(
    config: EngineConfig, go_on: Callable[[], None] = lambda: None, ready: ReadyModel | None = None
) -> Engine:
    """Load the model, probe it (check that our attention can run it), find room for KV, allocate that, run the first
    steps, and compose the engine. go_on: called now and then during long work, to show that the start goes on. ready: a
    model that was loaded and probed before, for the same settings of the model and without ranks. Raises ModelRefused
    with a message for people."""
    if config.model.tensor_parallel > 1:
        from reprise.engine.build.shared import build_shared

        loaded, probed, room, tiers, warm = build_shared(config)
    else:
        if ready is None:
            loaded = load(config)
            probed = probe_model(loaded, config, go_on)
        else:
            loaded = replace(ready.loaded, free_bytes=memory().available, link=dram_link(config.experiment, 1))
            probed = ready.probed
        room = find_room(config, loaded, probed)
        tiers = build_tiers(config, loaded, probed, room)
        remembered_in = config.cache.disk_dir if ready is None else ready.first_steps
        if ready is None and tiers.disk_problem is not None:
            remembered_in = ""  # the directory does not answer
        warm = warm_up(config, loaded, probed, room, tiers, remembered_in=remembered_in)
        build_selector(config, loaded, probed, warm.runner, num_pages=room.num_pages, max_context=room.max_context)
    if ready is None and loaded.device.type == "cpu":
        move_into_large_pages()
    if loaded.offloaded is not None:
        warm.runner.weights = loaded.offloaded.stream
    info = _model_info(config, loaded, probed, room, tiers, warm)
    if BLOCK_SCORERS[config.cache.block_scorer]().needs == "attention":
        backend = warm.runner.backend
        warm.runner.watch = WatchedAttention(backend, num_layers=len(tiers.pages), block_tokens=BLOCK_TOKENS)
    unix_offset_s = time.time() - time.monotonic()
    cache = _cache(config, probed, room, tiers, unix_offset_s)
    scheduler = build_scheduler(
        config,
        cache,
        tiers.rates,
        warm.step_tokens,
        warm.least_chunk_tokens,
        room.max_context,
        most_tokens=_most_tokens(room, probed, warm),
    )
    return assemble(config, loaded, probed, room, tiers, warm, info, cache, scheduler, unix_offset_s)


def _most_tokens(room: Room, probed: ProbedModel, warm: WarmModel) -> int | None:
    """Return the most tokens of any step; None: nothing limits that."""
    limits = [] if warm.most_tokens is None else [warm.most_tokens]
    if room.most_pages:
        limits.append(chunk_pages(room.most_pages) * probed.page_size)
    return min(limits, default=None)


def _cache(config: EngineConfig, probed: ProbedModel, room: Room, tiers: Tiers, unix_offset_s: float) -> CacheManager:
    """Make the cache manager, and restore the blocks and sessions that an earlier server has left on disk."""
    settings, on_cpu = config.cache, tiers.pages[0].k.device.type == "cpu"
    domain_of = functools.lru_cache(maxsize=4096)(
        lambda tenant, salt: KeyDomain(
            secret=config.tenant_secret, fingerprint=probed.fingerprint, tenant=tenant, salt=salt
        )
    )
    truncation_mode = config.experiment.truncation_mode if probed.found.decouplable else "recompute"
    cache = CacheManager(
        options=CacheOptions(
            num_pages=room.num_pages - room.ring_pages,
            most_pages=room.most_pages,
            page_size=probed.page_size,
            bytes_per_token=probed.stored_bytes_per_token,
            hbm_bytes_per_token=probed.hbm_bytes_per_token,
            prefer_contiguous=on_cpu,
            num_slots=tiers.num_slots,
            dram_slots=tiers.dram_slots,
            disk_bytes=tiers.disk_bytes,
            coded_block_bytes=sum(probed.coded_segment_bytes or ()),
            coded_slots=tiers.coded_slots,
            redis_bytes=settings.redis_bytes * len(settings.redis_urls),
            head_key=_head_key(config.tenant_secret, probed.fingerprint) if tiers.has_redis else b"",
            hbm_high_water=config.experiment.hbm_high_water,
            hbm_low_water=min(config.experiment.hbm_low_water, config.experiment.hbm_high_water),
            dram_free_buffer=DRAM_FREE_BUFFER,
            reuse=settings.mode != "recompute",
            only_as_computed=config.model.exact == "on"
            or probed.codec.projection is not None
            or probed.pages.is_packed,
            truncation=Truncation(
                window=room.max_context,
                ratio=config.experiment.truncation_ratio,
                mode=truncation_mode,
                block_scorer=settings.block_scorer,
                recall=settings.recall,
            ),
            session_ttl_s=settings.ttl_s,
            max_sessions=settings.max_sessions,
            unix_offset_s=unix_offset_s,
        ),
        policy=POLICIES[settings.policy],
        domain_of=domain_of,
        rates=tiers.rates,
        arrived=tiers.arrived,
        progress=tiers.transfer.progress,
    )
    if tiers.disk_problem is None:
        cache.sessions.restore(tiers.extents, tiers.records, time.monotonic())
    else:
        cache.disk_is_unseen(tiers.disk_problem)
    if probed.codec.is_refused:
        cache.condemn_codec()
    return cache


def _head_key(secret: bytes, fingerprint: bytes) -> bytes:
    """Derive the key that signs heads, the records by which another replica takes over a session, from the
    installation's secret and the model's fingerprint."""
    return blake2b(typed_fields("reprise-heads", fingerprint), key=blake2b(secret).digest(), digest_size=32).digest()


def _model_info(
    config: EngineConfig, loaded: LoadedModel, probed: ProbedModel, room: Room, tiers: Tiers, warm: WarmModel
) -> ModelInfo:
    found, kv_bytes, stored_bytes = probed.found, probed.kv_bytes_per_token, probed.stored_bytes_per_token
    hbm_tokens, dram_tokens = room.num_pages * probed.page_size, tiers.dram_slots * BLOCK_TOKENS
    is_raw = probed.codec.codec is None or probed.codec.is_refused
    coded_dram_bytes = tiers.coded_slots * sum(probed.coded_segment_bytes or ())
    return ModelInfo(
        name=_name(config.model.source),
        path=str(loaded.path.resolve()),
        architecture=type(loaded.module).__name__,
        parameters=loaded.parameters,
        dtype=str(loaded.dtype).removeprefix("torch."),
        weights=loaded.packing,
        device=str(loaded.device),
        attention_backend=probed.backend.name,
        max_context=room.max_context,
        own_context=room.own_context,
        vocab_size=loaded.text.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        media_token_ids=loaded.media_token_ids,
        logit_error=found.logit_error,
        logit_tolerance=found.logit_tolerance,
        exact=warm.exactness.proven,
        exactness=warm.exactness.detail,
        decouplable=found.decouplable,
        rope_layers=sum(rope is not None for rope in found.ropes),
        layers=len(found.shapes),
        kv_bytes_per_token=kv_bytes,
        hbm_bytes_per_token=probed.hbm_bytes_per_token,
        hbm_dtype=str(probed.pages.format.dtype).removeprefix("torch."),
        hbm_divergence=probed.pages.divergence,
        hbm_tokens=hbm_tokens,
        dram_tokens=dram_tokens + tiers.coded_slots * BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        page_size=probed.page_size,
        codec="raw" if probed.codec.is_refused else probed.codec.name,
        lossy_codec=not is_raw,
        coded_bytes=1.0 if probed.codec.is_refused else probed.coded_bytes,
        codec_divergence=None if is_raw else probed.codec.divergence,
        selector=config.selector.name,
        fingerprint=probed.fingerprint.hex(),
        warnings=(
            *room.warnings,
            *(warning for warning in (probed.codec.warning, probed.pages.warning) if warning),
            *_tier_warnings(config.cache, tiers, hbm_tokens, room.max_context),
        ),
        memory_plan={
            "weights": loaded.hbm_weight_bytes,
            **({"weights_dram": loaded.dram_weight_bytes} if loaded.offloaded is not None else {}),
            "hbm": hbm_tokens * probed.hbm_bytes_per_token,
            **({"graphs": warm.graph_bytes} if warm.graph_bytes else {}),
            "dram": dram_tokens * stored_bytes + coded_dram_bytes,
            "staging": (tiers.num_slots - tiers.dram_slots) * stored_bytes * BLOCK_TOKENS,
            "disk": tiers.disk_bytes,
            **({"coding": room.coding} if room.coding else {}),
        },
    )


def _tier_warnings(config: CacheConfig, tiers: Tiers, hbm_tokens: int, window: int) -> list[str]:
    warnings: list[str] = []
    if config.mode == "attentionstore":
        if config.dram_bytes != 0:
            warnings += dram_warnings((tiers.dram_slots + tiers.coded_slots) * BLOCK_TOKENS, hbm_tokens, window)
        if tiers.disk_problem is not None:
            directory = config.disk_dir
            warnings.append(f"{directory} is not used yet, and is when it answers: {tiers.disk_problem}")
        elif config.disk_bytes is None and not tiers.disk_bytes:
            warnings.append("nothing is kept on disk: no space is free above cache.disk_min_free_gib")
    if tiers.has_redis and not tiers.disk_bytes:
        warnings.append("nothing is uploaded to Redis, because uploads come from disk; what others upload is loaded")
    return warnings


def _name(model: str) -> str:
    """Return the model's id for clients: the hub id, or the name of the directory or the file that was given. Weights
    that are packed at load lie in a directory of another name."""
    given = Path(model).expanduser()
    if not given.exists():
        return model
    return given.stem if given.is_file() else given.resolve().name
