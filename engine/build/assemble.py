"""Puts the parts of an engine together: its requests, its steps and its sessions."""

import functools
import random

import torch

from reprise.cache.manager import CacheManager
from reprise.engine.build.first_steps import WarmModel
from reprise.engine.build.model import LoadedModel, ProbedModel
from reprise.engine.build.room import Room
from reprise.engine.build.tiers import Tiers
from reprise.engine.codec.verdict import CodecVerdict
from reprise.engine.config import CacheConfig, EngineConfig
from reprise.engine.drafts.drafter import Drafter
from reprise.engine.endings import Endings
from reprise.engine.engine import Engine
from reprise.engine.engine_stats import StatsSources, collect
from reprise.engine.intake import Intake
from reprise.engine.messages import ModelInfo
from reprise.engine.model.batch import BlockTables
from reprise.engine.model.cpu.modules import FEW_ROWS
from reprise.engine.parked.parked_attention import ParkedAttention
from reprise.engine.progress import PromptProgress
from reprise.engine.requests import KnownRequests
from reprise.engine.sessions import SessionDirectory
from reprise.engine.step.batch_step import BatchStep
from reprise.engine.step.choices import RunningChoices
from reprise.engine.step.compute import StepCompute
from reprise.engine.step.drawing import Drawing
from reprise.engine.step.grammar import GrammarCompiler
from reprise.engine.step.moves import StepMoves
from reprise.engine.step.recompute import Recompute
from reprise.engine.step.restarts import Restarts
from reprise.engine.step.verify import Verifier
from reprise.scheduler.scheduler import Scheduler

_MAX_PINNED_SHARE = 0.5  # share of the disk (or DRAM, without one) that a tenant's pinned sessions may hold


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    room: Room,
    tiers: Tiers,
    warm: WarmModel,
    info: ModelInfo,
    cache: CacheManager,
    scheduler: Scheduler,
    unix_offset_s: float,
) -> Engine:
    """Make an Engine from parts that are built already: model, memory, tiers, cache and scheduler. unix_offset_s:
    seconds to add to the monotonic clock to get Unix time."""
    choices = RunningChoices()
    tables = BlockTables(max_seqs=config.scheduler.max_seqs, max_pages=-(-room.max_context // probed.page_size))
    drafter = _drafter(config.scheduler.draft_tokens, loaded, room, warm)
    verifier = _verifier(config.cache, loaded, probed, tiers, warm, cache)
    endings = Endings(cache=cache, scheduler=scheduler, choices=choices, tables=tables, drafter=drafter)
    requests = KnownRequests(
        intake=_intake(config, loaded, info, cache, scheduler, choices), choices=choices, endings=endings, cache=cache
    )
    compute = StepCompute(
        runner=warm.runner,
        cache=cache,
        transfer=tiers.transfer,
        tables=tables,
        device=loaded.device,
        sink=warm.sink,
        parked=_parked(room, tiers, warm),
    )
    moves = StepMoves(cache=cache, transfer=tiers.transfer, scheduler=scheduler)
    restarts = Restarts(
        cache=cache, scheduler=scheduler, choices=choices, tables=tables, moves=moves, verifier=verifier
    )
    drawing = Drawing(
        cache=cache,
        compute=compute,
        endings=endings,
        restarts=restarts,
        drafter=drafter,
        max_context=info.max_context,
    )
    step = BatchStep(
        cache=cache,
        scheduler=scheduler,
        choices=choices,
        compute=compute,
        moves=moves,
        restarts=restarts,
        drawing=drawing,
        drafter=drafter,
    )
    sources = StatsSources(
        scheduler=scheduler,
        cache=cache,
        transfer=tiers.transfer,
        requests=requests,
        step=step,
        moves=moves,
        drawing=drawing,
        compute=compute,
        verifier=verifier,
        drafter=drafter,
    )
    return Engine(
        model=info,
        cache=cache,
        transfer=tiers.transfer,
        requests=requests,
        step=step,
        sessions=_sessions(config.cache, tiers, info, cache, unix_offset_s),
        first_touch=tiers.first_touch,
        progress=PromptProgress(choices=choices, scheduler=scheduler),
        stats=functools.partial(collect, sources),
    )


def _intake(
    config: EngineConfig,
    loaded: LoadedModel,
    info: ModelInfo,
    cache: CacheManager,
    scheduler: Scheduler,
    choices: RunningChoices,
) -> Intake:
    return Intake(
        model=info,
        cache=cache,
        scheduler=scheduler,
        grammars=GrammarCompiler(
            tokenizer=loaded.path / "tokenizer.json", vocab_size=info.vocab_size, end_ids=info.eos_token_ids
        ),
        choices=choices,
        truncation=config.cache.truncation,
    )


def _sessions(
    config: CacheConfig, tiers: Tiers, info: ModelInfo, cache: CacheManager, unix_offset_s: float
) -> SessionDirectory:
    return SessionDirectory(
        sessions=cache.sessions,
        has_redis=cache.tiers.redis.is_on,
        max_pinned_bytes=int(_MAX_PINNED_SHARE * (tiers.disk_bytes or info.memory_plan["dram"])),
        session_ttl_s=config.ttl_s,
        unix_offset_s=unix_offset_s,
    )


def _drafter(most_tokens: int, loaded: LoadedModel, room: Room, warm: WarmModel) -> Drafter | None:
    if not (most_tokens and _may_draft(loaded, room, warm)):
        return None
    return Drafter(most_tokens=most_tokens, most_rows=FEW_ROWS, max_context=room.max_context)


def _may_draft(loaded: LoadedModel, room: Room, warm: WarmModel) -> bool:
    """Return whether drafts may be computed. Steps must run on a CPU: on CUDA a step with one row per sequence is
    replayed as a CUDA graph, and any other step takes five times as long. Several rows of a sequence must give the same
    bits as one by one (in fp32 the last bits may differ). All of a context must be read: no selector, and no context
    larger than HBM."""
    runner = warm.runner
    is_alike = warm.rows_agree or loaded.dtype == torch.float32
    reads_all = not room.most_pages and runner.selecting is None and runner.watch is None
    return loaded.device.type == "cpu" and is_alike and reads_all


def _parked(room: Room, tiers: Tiers, warm: WarmModel) -> ParkedAttention | None:
    if not room.ring_pages:
        return None
    runner, ring = warm.runner, range(room.num_pages - room.ring_pages, room.num_pages)
    return ParkedAttention(inner=runner.backend, pages=runner.pages, ring=ring, transfer=tiers.transfer)


def _verifier(
    config: CacheConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    tiers: Tiers,
    warm: WarmModel,
    cache: CacheManager,
) -> Verifier | None:
    if not (config.verify_rate and tiers.num_slots):
        return None
    chosen = probed.codec
    verdict = None
    if chosen.budget is not None and not chosen.is_refused:
        verdict = CodecVerdict(codec=chosen.name, budget=chosen.budget)
    return Verifier(
        recompute=Recompute(
            runner=warm.runner,
            cache=cache,
            page_size=probed.page_size,
            device=loaded.device,
            chunk_tokens=warm.step_tokens,
        ),
        cache=cache,
        rate=config.verify_rate,
        logit_tolerance=probed.found.logit_tolerance,
        verdict=verdict,
        on_condemned=chosen.remember,
        rng=random.Random(),
    )
