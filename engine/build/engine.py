"""The composition root: EngineConfig -> Engine. Whatever is automatic is resolved here, once."""

import functools
import logging
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cache.blocks.keys import BLOCK_TOKENS, KeyDomain
from cache.manager import CacheManager
from cache.options import CacheOptions, Truncation
from cache.transfer.capture import CaptureSink
from engine.build.resources import disk_room, memory
from engine.build.scheduler import build_scheduler
from engine.build.sizes import automatic_sizes, dram_warnings
from engine.build.tiers import build_tiers, policy_factory
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.engine import Engine
from engine.messages import ModelInfo
from engine.model.batch import BlockTables
from engine.model.cpu.optimise import optimise_for_cpu
from engine.model.exactness import TOKENS as PROOF_TOKENS
from engine.model.exactness import Exactness, Proof
from engine.model.loading import ModelRefused, load_model, resolve_files, rope_limit
from engine.model.probe import ProbeResult, probe
from engine.model.runner import ModelRunner, bytes_per_token, fingerprint, make_pages, weights_digest
from engine.model.warm_up import WarmUp
from engine.session_directory import SessionDirectory
from engine.step.choices import RunningChoices
from engine.step.compute import StepCompute
from engine.step.grammar import GrammarCompiler
from engine.step.intake import Intake
from engine.step.verify import Verifier
from kernels.attention import BACKENDS
from kernels.attention.ragged_batch import AttentionBackend, AttentionUnsupported, BackendUnavailable
from kernels.attention.torch_cpu import ExactAttention
from kernels.cpu.available import flash_kernels, product_kernels, tiles_of_pairs

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_STEP_TOKENS, _CUDA_STEP_TOKENS = 512, 4096
_FREE_PROOF_S = 3.0  # a start may take so much longer where nobody asked for the proof


def build_engine(config: EngineConfig) -> Engine:
    """Load, probe, optimise, allocate, warm up. Raises ModelRefused with a message for people."""
    device = _device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype = _dtype(config.model.dtype, device)
    path = resolve_files(config.model.source, Path(config.cache.disk_dir) / "models")
    free = memory().available  # before the weights, which are a mapped file first and copies of it later
    model = load_model(path, dtype, device)
    backend, page_size, probed = _probe(model, device)
    log.debug(
        "probe: relative logit error %.1e of %.1e tolerated, positions decoupled: %s",
        probed.logit_error,
        probed.logit_tolerance,
        probed.decouplable,
    )
    exact = config.model.exact == "on" and device.type == "cpu" and dtype == torch.bfloat16
    if exact:
        backend = _exact_attention()
    digest = fingerprint(model, weights_digest(model), backend.name)
    parameters = sum(p.numel() for p in model.parameters())
    if device.type == "cpu":
        optimised = optimise_for_cpu(model, probed, backend, exact)
        log.debug("replaced for speed: %s", optimised)

    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    warnings: list[str] = []
    if not probed.decouplable:
        warnings.append("positions cannot be decoupled from keys: after truncation the history is recomputed")
    max_context = _max_context(config.model, text, warnings)
    kv_bytes = bytes_per_token(probed.shapes, dtype)
    sizes = automatic_sizes(
        memory=free,
        device_memory=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        disk=_disk_room(config.cache),
        weights=parameters * dtype.itemsize,
        kv_bytes_per_token=kv_bytes,
        window_tokens=max_context,
        hbm_tokens=config.cache.hbm_tokens,
    )
    num_pages, max_context = _num_pages(
        config.cache.hbm_tokens, sizes.hbm // kv_bytes, page_size, max_context, warnings
    )
    pages = make_pages(probed.shapes, num_pages, page_size, dtype, device)

    domain_of = functools.lru_cache(maxsize=4096)(
        lambda tenant, salt: KeyDomain(secret=config.tenant_secret, fingerprint=digest, tenant=tenant, salt=salt)
    )
    tiers = build_tiers(config, probed, dtype, pages, digest, parameters, sizes)
    hbm_tokens, dram_tokens = num_pages * page_size, tiers.dram_slots * BLOCK_TOKENS
    if config.cache.mode == "attentionstore":
        if config.cache.dram_bytes != 0:
            warnings += dram_warnings(dram_tokens, hbm_tokens, max_context)
        if config.cache.disk_bytes is None and not tiers.disk_bytes:
            warnings.append("nothing is kept on disk: no space is free above cache.disk_min_free_gib")
    mode = config.cache.truncation_mode if probed.decouplable else "recompute"
    unix_offset_s = time.time() - time.monotonic()
    cache = CacheManager(
        options=CacheOptions(
            num_pages=num_pages,
            page_size=page_size,
            bytes_per_token=kv_bytes,
            prefer_contiguous=device.type == "cpu",
            num_slots=tiers.num_slots,
            dram_slots=tiers.dram_slots,
            disk_bytes=tiers.disk_bytes,
            hbm_high_water=config.cache.hbm_high_water,
            hbm_low_water=min(config.cache.hbm_low_water, config.cache.hbm_high_water),
            dram_free_buffer=config.cache.dram_free_buffer,
            reuse=config.cache.mode != "recompute",
            exact=config.model.exact == "on",
            truncation=Truncation(max_context, config.cache.truncation_ratio, mode),
            session_ttl_s=config.cache.ttl_s,
            max_sessions=config.cache.max_sessions,
            unix_offset_s=unix_offset_s,
        ),
        policy=policy_factory(config.cache.policy, config.cache.granularity),
        domain_of=domain_of,
        rates=tiers.rates,
        arrived=tiers.arrived,
        progress=tiers.transfer.progress,
    )
    cache.sessions.restore(tiers.extents, tiers.records, time.monotonic())
    step_tokens = config.step_tokens or (_CPU_STEP_TOKENS if device.type == "cpu" else _CUDA_STEP_TOKENS)
    sink = CaptureSink() if tiers.num_slots else None
    runner = ModelRunner(model=model, pages=pages, backend=backend, sink=sink)
    tables = BlockTables(max_seqs=config.scheduler.max_seqs, max_pages=-(-max_context // page_size))
    most_rows = min(num_pages * page_size, max_context)
    warm_up = WarmUp(runner=runner, most_rows=most_rows, page_size=page_size, device=device)
    step_s, token_s = warm_up.step_times()
    tiers.rates.expect_steps(step_s, token_s)
    # With a target, or none at all, nobody asks for it.
    least_chunk_tokens = warm_up.efficient_tokens(step_tokens) if config.scheduler.itl_target_s is None else 0
    scheduler = build_scheduler(config, cache, tiers.rates, step_tokens, least_chunk_tokens, max_context)
    proof = Proof(
        runner=runner,
        num_pages=num_pages,
        page_size=page_size,
        max_context=max_context,
        vocab_size=text.vocab_size,
        device=device,
    )
    exactness = _exactness(config.model.exact, proof, PROOF_TOKENS * token_s)
    info = ModelInfo(
        name=_name(config.model.source, path),
        path=str(path.resolve()),
        architecture=type(model).__name__,
        parameters=parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend.name,
        max_context=max_context,
        vocab_size=text.vocab_size,
        eos_token_ids=_eos_ids(model),
        logit_error=probed.logit_error,
        logit_tolerance=probed.logit_tolerance,
        exact=exactness.proven,
        exactness=exactness.detail,
        decouplable=probed.decouplable,
        rope_layers=sum(rope is not None for rope in probed.ropes),
        layers=len(probed.shapes),
        kv_bytes_per_token=kv_bytes,
        hbm_tokens=hbm_tokens,
        block_size=BLOCK_TOKENS,
        page_size=page_size,
        fingerprint=digest.hex(),
        warnings=tuple(warnings),
        memory_plan={
            "weights": parameters * dtype.itemsize,
            "hbm": hbm_tokens * kv_bytes,
            "dram": dram_tokens * kv_bytes,
            "staging": (tiers.num_slots - tiers.dram_slots) * kv_bytes * BLOCK_TOKENS,
            "disk": tiers.disk_bytes,
        },
    )
    directory = SessionDirectory(
        sessions=cache.sessions,
        max_pinned_bytes=int(config.cache.max_pinned_share * (tiers.disk_bytes or dram_tokens * kv_bytes)),
        session_ttl_s=config.cache.ttl_s,
        unix_offset_s=unix_offset_s,
    )
    verifier = None
    if config.cache.verify_rate and tiers.num_slots:
        verifier = Verifier(
            runner=runner,
            cache=cache,
            page_size=page_size,
            device=device,
            rate=config.cache.verify_rate,
            logit_tolerance=probed.logit_tolerance,
            chunk_tokens=step_tokens,
            rng=random.Random(),
        )
    choices = RunningChoices()
    intake = Intake(
        model=info,
        cache=cache,
        scheduler=scheduler,
        grammars=GrammarCompiler(
            tokenizer=path / "tokenizer.json", vocab_size=text.vocab_size, end_ids=info.eos_token_ids
        ),
        choices=choices,
        truncation=config.cache.truncation,
    )
    return Engine(
        model=info,
        cache=cache,
        scheduler=scheduler,
        transfer=tiers.transfer,
        choices=choices,
        intake=intake,
        compute=StepCompute(
            runner=runner, cache=cache, transfer=tiers.transfer, tables=tables, device=device, sink=sink
        ),
        verifier=verifier,
        directory=directory,
        first_touch=tiers.first_touch,
    )


def _disk_room(config: CacheConfig) -> int:
    """Where the config leaves its size open; 0 where it does not, or the disk is not used."""
    if config.disk_bytes is not None or config.mode != "attentionstore":
        return 0
    try:
        return disk_room(Path(config.disk_dir), config.disk_min_free_bytes)
    except OSError as error:
        raise ModelRefused(f"the cache directory {config.disk_dir} cannot be used: {error}") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("device is cuda, but torch sees no CUDA device")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def _probe(model: nn.Module, device: torch.device) -> tuple[AttentionBackend, int, ProbeResult]:
    """The first backend that runs here and does what the model asks, its page size, and the probe's findings."""
    problems = []
    for name in ("flash", "triton", "torch_cpu") if device.type == "cuda" else ("torch_cpu",):
        try:
            backend = BACKENDS[name]()
            page_size = math.lcm(backend.page_multiple, BLOCK_TOKENS)
            return backend, page_size, probe(model, backend, page_size)
        except (BackendUnavailable, AttentionUnsupported) as error:
            problems.append(f"{name}: {error}")
            log.info("attention backend %s is passed over: %s", name, error)
    raise ModelRefused(f"no attention backend runs this model here: {'; '.join(problems)}")


def _exact_attention() -> AttentionBackend:
    """Raises ModelRefused where bf16 cannot be exact."""
    if product_kernels() is None or flash_kernels(exact=True) is None:
        raise ModelRefused(
            "model.exact is on, but bf16 has kernels for it on processors with AVX512_BF16 only, and where numba runs: "
            "take model.exact auto"
        )
    return ExactAttention(kind="tiles" if tiles_of_pairs() else "pairs")


def _exactness(wanted: str, proof: Proof, proof_s: float) -> Exactness:
    """What the loaded model is proven to give. Raises ModelRefused if that is less than is wanted."""
    if wanted == "off":
        return Exactness(False, "not asked for (model.exact off)")
    if wanted == "auto" and proof_s > _FREE_PROOF_S:
        return Exactness(False, f"not tried, it takes some {proof_s:.0f} s here (model.exact on)")
    found = proof.run()
    if wanted == "on" and not found.proven:
        raise ModelRefused(f"model.exact is on, but {found.detail}: take model.exact auto, or another model.dtype")
    return found


def _max_context(config: ModelConfig, text: Any, warnings: list[str]) -> int:
    trained: int = text.max_position_embeddings
    limit = rope_limit(text)
    if limit is not None and limit < trained:
        warnings.append(f"context limited to {limit}: behind it this model's positions depend on the longest request")
        trained = limit
    if config.max_context > trained:
        warnings.append(f"model.max_context {config.max_context} lowered to the {trained} that the model supports")
    return min(trained, config.max_context or trained)


def _num_pages(
    given_tokens: int, automatic_tokens: int, page_size: int, max_context: int, warnings: list[str]
) -> tuple[int, int]:
    """(pages, max_context). One request with the whole window must always fit, with the pages its first rows may have
    to be copied from; else it would wait for ever."""
    spare = page_size // BLOCK_TOKENS
    tokens = given_tokens or automatic_tokens
    pages = tokens // page_size
    if pages <= spare:
        why = "" if given_tokens else "the memory that is free holds no more beside the weights; "
        raise ModelRefused(f"HBM for {tokens} tokens is too small: {why}{(spare + 1) * page_size} is the least")
    room = (pages - spare) * page_size
    if room < max_context:
        why = "" if given_tokens else ", of the memory that is free beside the weights"
        warnings.append(f"context limited to {room} of {max_context} tokens: HBM holds no more{why} (cache.hbm_tokens)")
    return pages, min(max_context, room)


def _eos_ids(model: nn.Module) -> tuple[int, ...]:
    """End-of-text ids: generation_config's, else the config's."""
    for holder in (getattr(model, "generation_config", None), model.config):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return ()


def _name(model: str, path: Path) -> str:
    """The id that clients use: the hub id, or the name of the directory or the file."""
    given = Path(model).expanduser()
    if not given.exists():
        return model
    return given.stem if given.is_file() else path.resolve().name
