"""Runs the first steps of an engine, on trial tokens, before it is composed. They show how long steps take, and whether
a row's result depends on the rest of its batch."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.transfer.capture import CaptureSink
from reprise.cache.transfer.coding import DECODING_FACTOR, PART_BYTES
from reprise.engine.build.eager import why_eager
from reprise.engine.build.model import LoadedModel, ProbedModel
from reprise.engine.build.remembered import FirstSteps, Remembered, key_of
from reprise.engine.build.room import Room
from reprise.engine.build.scheduler import lone_step_tokens
from reprise.engine.build.tiers import Tiers
from reprise.engine.config import EngineConfig
from reprise.engine.model.cpu.modules import FEW_ROWS
from reprise.engine.model.cuda.capture import CaptureOnCuda
from reprise.engine.model.exactness import TOKENS as PROOF_TOKENS
from reprise.engine.model.exactness import Exactness, Proof
from reprise.engine.model.graph_runner import GraphRunner, PlanMaker
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.warm_up import WarmUp
from reprise.kernels.device_errors import lacks_memory

log = logging.getLogger(__name__)

_CPU_STEP_TOKENS, _CUDA_STEP_TOKENS = 512, 4096
_PROOF_PAGES = 64  # pages that the proof needs; more change nothing
_FREE_PROOF_S = 3.0  # longest proof at a start that was not asked for


@dataclass(frozen=True, slots=True)
class WarmModel:
    """A model that has run trial steps on the pages from which it will be served, with the results of these steps."""

    runner: ModelRunner
    sink: CaptureSink | None  # None while there is no tier below HBM
    step_tokens: int  # budget of a step
    most_tokens: int | None  # largest step for which the device has memory; None: memory suffices for every step
    least_chunk_tokens: int  # size of a prompt's chunk below which products are inefficient; 0: not measured
    rows_agree: bool  # whether few rows at once have the bits that they have one by one
    exactness: Exactness
    graph_bytes: int = 0  # bytes of the device for decode steps as graphs


def warm_up(
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    room: Room,
    tiers: Tiers,
    make_runner: Callable[..., ModelRunner] = ModelRunner,
    *,
    remembered_in: str | Path,
) -> WarmModel:
    """Run the trial steps of an engine's start, on pages that are not in use yet. Their measured times go to
    `tiers.rates`, which compares the time to compute KV with the time to load it. make_runner: makes the ModelRunner
    where steps are not replayed as CUDA graphs. remembered_in: the directory that keeps the steps' results; empty:
    nothing is kept. Raises ModelRefused if model.exact is on and it is not proven that a row's result depends on its
    own tokens alone."""
    device, page_size = loaded.device, probed.page_size
    sink = CaptureSink() if tiers.num_slots else None
    shown: dict[str, Any] = {"sink": sink}
    if probed.codec.projection is not None and sink is not None:
        shown = {"sink": None, "inputs": sink.write_input}
    make_runner = _graphs_or(make_runner, config, loaded, probed, room, device)
    runner = make_runner(model=loaded.module, pages=tiers.pages, backend=probed.backend, **shown)
    most_rows = min(room.num_pages * page_size, room.max_context)
    steps = WarmUp(runner=runner, most_rows=most_rows, page_size=page_size, device=device)
    step_tokens = config.step_tokens or (_CPU_STEP_TOKENS if device.type == "cpu" else _CUDA_STEP_TOKENS)
    remembered = Remembered(Path(remembered_in), _key(config, loaded, probed, room, runner))
    seen = remembered.recall() if device.type == "cpu" and remembered_in else None
    if seen is None:
        step_s, token_s = steps.step_times()
        # With a target for steps, or no target at all, the number is not needed.
        least_chunk_tokens = steps.efficient_tokens(step_tokens) if config.scheduler.itl_target_s is None else 0
        exactness = _exactness(config, loaded, probed, room, runner, token_s)
        seen = FirstSteps(
            step_s=step_s,
            token_s=token_s,
            least_chunk_tokens=least_chunk_tokens,
            rows_agree=device.type == "cpu" and steps.rows_agree(FEW_ROWS),
            proven=exactness.proven,
            detail=exactness.detail,
        )
        if remembered_in:
            remembered.keep(seen)
    else:
        steps.run_once()
    steps.decode(config.scheduler.max_seqs)  # before the largest step is tried, beside which graphs keep their memory
    wanted = min(most_rows, lone_step_tokens(config, step_tokens))
    most_tokens = _most_tokens(steps, wanted, device, kept_bytes=_decoding_bytes(loaded, probed, room, tiers))
    tiers.rates.expect_steps(seen.step_s, seen.token_s)
    return WarmModel(
        runner=runner,
        sink=sink,
        step_tokens=step_tokens,
        most_tokens=most_tokens,
        least_chunk_tokens=seen.least_chunk_tokens,
        rows_agree=seen.rows_agree,
        exactness=seen.exactness,
        graph_bytes=runner.graph_bytes if isinstance(runner, GraphRunner) else 0,
    )


def _graphs_or(
    make_runner: Callable[..., ModelRunner],
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    room: Room,
    device: torch.device,
) -> Callable[..., ModelRunner]:
    """Return a function that makes a runner which replays decode steps as CUDA graphs, if the device is CUDA and the
    settings allow graphs; otherwise `make_runner`."""
    if device.type != "cuda":
        return make_runner
    if why := why_eager(config, loaded, probed):
        log.warning("every step runs without CUDA graphs, which costs several times the time of a token: %s", why)
        return make_runner
    assert isinstance(probed.backend, PlanMaker)
    return functools.partial(
        GraphRunner,
        scratch_page=room.num_pages,
        max_context=room.max_context,
        held_tokens=room.num_pages * probed.page_size,
        planner=probed.backend,
        capture=CaptureOnCuda(),
    )


def _most_tokens(steps: WarmUp, wanted: int, device: torch.device, *, kept_bytes: int) -> int | None:
    """Return the largest step, in tokens, for which the device has memory while `kept_bytes` stay free for loads; None:
    the wanted size fits. Raises ModelRefused."""
    if device.type != "cuda":
        return None
    try:
        found = _tokens_beside(steps, wanted, device, kept_bytes)
    except (RuntimeError, ModelRefused) as error:
        if not kept_bytes or not (isinstance(error, ModelRefused) or lacks_memory(error)):
            raise
        log.warning(
            "the device has no memory in which a whole window is decoded beside a step: some loads are computed"
        )
        found = _tokens_beside(steps, wanted, device, 0)
    if found == wanted:
        return None
    log.warning("steps have at most %d tokens: the device has no memory for %d", found, wanted)
    return found


def _tokens_beside(steps: WarmUp, wanted: int, device: torch.device, kept_bytes: int) -> int:
    """Return the largest step, in tokens, up to `wanted`, for which the device has memory while `kept_bytes` are
    allocated besides. Raises ModelRefused if even a small step does not fit. If `kept_bytes` cannot be allocated,
    raises an error for which `lacks_memory` is true."""
    kept = torch.empty(kept_bytes, dtype=torch.uint8, device=device)
    try:
        return steps.tokens_that_fit(wanted)
    finally:
        del kept
        torch.cuda.empty_cache()  # what is decoded on another stream cannot have it otherwise


def _decoding_bytes(loaded: LoadedModel, probed: ProbedModel, room: Room, tiers: Tiers) -> int:
    """Return the bytes of device memory that a load needs to undo the codec for all stored rows of a longest context,
    one layer at a time; 0 if the CPU decodes or nothing is decoded."""
    decodes = probed.codec.projection or probed.codec.decodes
    if decodes is None or decodes.device.type == "cpu" or not tiers.num_slots:
        return 0
    row = max(shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in probed.found.shapes) * loaded.dtype.itemsize
    stored = max(probed.coded_segment_bytes or (0,)) / BLOCK_TOKENS
    return int(room.max_context * (row + stored)) + DECODING_FACTOR * PART_BYTES


def _key(config: EngineConfig, loaded: LoadedModel, probed: ProbedModel, room: Room, runner: ModelRunner) -> str:
    """Return a key of everything that decides the results of the trial steps at an engine's start: settings, machine
    and code."""
    made = type(runner).__name__, type(probed.backend).__name__, runner.saves_rows, loaded.num_ranks, loaded.rank
    # The proof needs a few hundred tokens of room; how much more there is depends on the memory that is free.
    sizes = min(room.num_pages, _PROOF_PAGES), room.max_context, probed.page_size, config.step_tokens
    settings = [
        msgspec.structs.asdict(part) for part in (config.model, config.scheduler, config.selector, config.weights)
    ]
    return key_of(probed.fingerprint, str(loaded.dtype), loaded.packing, made, sizes, settings, _lossy(config, probed))


def _lossy(config: EngineConfig, probed: ProbedModel) -> tuple[object, ...]:
    return config.cache.larger_than_hbm, config.cache.codec, probed.codec.name


def _exactness(
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    room: Room,
    runner: ModelRunner,
    token_s: float,
) -> Exactness:
    """Find out whether this engine's rows depend only on their own tokens, not on the rest of a batch. token_s: seconds
    that a token takes, to predict how long the proof takes. Raises ModelRefused if model.exact is on and the proof
    fails."""
    if probed.codec.codec is not None:
        return Exactness(False, "not asked for (cache.codec is lossy)")
    if probed.codec.projection is not None:
        return Exactness(False, "not asked for (cache.codec activation computes K and V anew)")
    if config.cache.larger_than_hbm:
        return Exactness(False, "not asked for (cache.larger_than_hbm: sums are ordered as there is room)")
    if config.selector.name != "none":
        return Exactness(False, "not asked for (selector.name: contexts are read in part)")
    if isinstance(runner, GraphRunner):
        return Exactness(False, "not asked for (decode steps are graphs, which model.exact on goes without)")
    proof = Proof(
        runner=runner,
        num_pages=room.num_pages,
        page_size=probed.page_size,
        max_context=room.max_context,
        vocab_size=loaded.text.vocab_size,
        device=loaded.device,
    )
    return _proven(config.model.exact, proof, PROOF_TOKENS * token_s)


def _proven(wanted: str, proof: Proof, proof_s: float) -> Exactness:
    """Prove that rows depend only on their own tokens. wanted: "off": no proof; "auto": only if it takes little time;
    "on". proof_s: seconds that the proof is expected to take. Raises ModelRefused if `wanted` is "on" and the proof
    fails."""
    if wanted == "off":
        return Exactness(False, "not asked for (model.exact off)")
    if wanted == "auto" and proof_s > _FREE_PROOF_S:
        return Exactness(False, f"not tried, it takes some {proof_s:.0f} s here (model.exact on)")
    found = proof.run()
    if wanted == "on" and not found.proven:
        raise ModelRefused(f"model.exact is on, but {found.detail}: take model.exact auto, or another model.dtype")
    return found
