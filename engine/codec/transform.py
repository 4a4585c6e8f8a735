"""Provides the transform codec of a model: from the file of an earlier start, or calibrated now."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.chosen import ChosenCodec
from reprise.engine.codec.quality import Subject
from reprise.engine.codec.refusal_file import load as load_refusal
from reprise.engine.codec.refusal_file import refuses
from reprise.engine.codec.refusal_file import save as save_refusal
from reprise.engine.codec.text import text_digest
from reprise.engine.config import CacheConfig
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.pages import bytes_per_token
from reprise.kernels.attention.ragged_batch import PageFormat

if TYPE_CHECKING:
    from reprise.engine.codec.calibration import Calibrated

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float32)


def make_transform(config: CacheConfig, subject: Subject, tokenizer: Path, fingerprint: bytes) -> ChosenCodec:
    """Return the transform codec that keeps to `cache.codec_budget` on a model, from the file of an earlier start or
    calibrated now. If no such codec keeps to the budget, the ChosenCodec has a warning and no codec. tokenizer: path of
    the model's `tokenizer.json`; fingerprint: bytes that identify the model. Raises ModelRefused if numba is missing or
    the dtype cannot be coded."""
    if subject.dtype not in _DTYPES:
        raise ModelRefused(f"cache.codec: KV in {subject.dtype} cannot be coded; take model.dtype bfloat16 or float32")
    try:
        # Here, because nothing else needs numba before its kernels are chosen, and a server that codes nothing never.
        from reprise.engine.codec.calibration_file import load
    except ImportError as error:
        raise ModelRefused(f"cache.codec transform needs numba, which cannot be used here: {error}") from error
    path = Path(config.disk_dir) / "codecs" / f"{fingerprint.hex()}-{config.codec_budget:g}.safetensors"
    refusals = path.with_suffix(".refused.json")
    refusal = load_refusal(refusals)
    calibrated = load(path, model=fingerprint, budget=config.codec_budget, dtype=subject.dtype)
    if calibrated is None and not refuses(refusal, made_of=text_digest(), codec=None):
        calibrated = _calibrated(config, subject, tokenizer, path, fingerprint)
        if calibrated is None:
            why = f"no step of the codec keeps to {config.codec_budget:g} nats a token on this model"
            save_refusal(refusals, codec="", made_of=text_digest(), why=why)
            return ChosenCodec(warning=f"cache.codec: {why}, KV stays raw")
    warning = (
        f"cache.codec: {refusal.why}; KV stays raw as long as there is {refusals}" if refusal is not None else None
    )
    if calibrated is None:
        return ChosenCodec(warning=warning)
    codec = calibrated.codec
    is_refused = refuses(refusal, made_of=text_digest(), codec=codec.name)
    return ChosenCodec(
        codec,
        None if is_refused else codec.on(subject.device),
        divergence=calibrated.divergence,
        warning=warning if is_refused else None,
        budget=config.codec_budget,
        refusals=refusals,
        is_refused=is_refused,
    )


def _calibrated(
    config: CacheConfig, subject: Subject, tokenizer: Path, path: Path, fingerprint: bytes
) -> "Calibrated | None":
    """Calibrate the codec now, and write the result to `path` for later starts. Return None if no codec keeps to the
    budget."""
    from reprise.engine.codec.calibration import calibrate
    from reprise.engine.codec.calibration_file import save
    from reprise.engine.codec.text import calibration_text

    log.info("calibrating the codec of KV for this model, once")
    started = time.perf_counter()
    learned, scored = calibration_text(tokenizer)
    made = calibrate(subject, budget=config.codec_budget, learned=learned, scored=scored)
    if made is None:
        return None
    raw = BLOCK_TOKENS * bytes_per_token(subject.found.shapes, PageFormat(subject.dtype))
    size = sum(made.codec.segment_bytes) / raw
    log.info(
        "coded KV takes %.2f of its bytes at %.5f nats a token (budget %g); %.0f s",
        size,
        made.divergence,
        config.codec_budget,
        time.perf_counter() - started,
    )
    try:
        save(path, made, model=fingerprint, budget=config.codec_budget)
    except OSError as error:
        log.warning("the calibration was not kept, the next start makes it anew: %s", error)
    return made
