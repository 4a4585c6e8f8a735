"""Chooses what KV below HBM or DRAM becomes, and calibrates that at the first start."""

import logging
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS, typed_fields
from reprise.engine.codec.activation import KvProjection, find_projection
from reprise.engine.codec.quality import Subject
from reprise.engine.codec.refusal_file import load as load_refusal
from reprise.engine.codec.refusal_file import refuses
from reprise.engine.codec.refusal_file import save as save_refusal
from reprise.engine.codec.text import text_digest
from reprise.engine.config import CacheConfig, SelectorConfig
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.pages import bytes_per_token
from reprise.engine.step.ports import Verdict
from reprise.kernels.codecs.codec import Codec, Decodes

if TYPE_CHECKING:
    from reprise.engine.codec.calibration import Calibrated

log = logging.getLogger(__name__)

_CODED_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class ChosenCodec:
    """codec None: KV below DRAM is what DRAM has. decodes: makes rows of its segments, for pages on the model's device;
    None: nothing is decoded. projection: makes KV of activations, which all tiers below HBM have instead; None: they
    have KV. divergence: nats a token as measured on this model; None: not measured. warning: for people, where
    something else was asked for. budget: nats a token that it was calibrated to; None: nothing is coded.
    refusals: where it is noted that it is not to be used. is_refused: it was condemned before: KV of earlier starts is
    named by it, and none is coded or decoded."""

    codec: Codec | None = None
    decodes: Decodes | None = None
    projection: KvProjection | None = None
    divergence: float | None = None
    warning: str | None = None
    budget: float | None = None
    refusals: Path | None = None
    is_refused: bool = False

    def remember(self, verdict: Verdict) -> None:
        """Keep later starts from using a codec that was condemned."""
        if self.refusals is not None and self.codec is not None:
            why = f"the shadow check found {verdict.recent:.2g} nats a token, {verdict.limit:.2g} are tolerated"
            save_refusal(self.refusals, codec=self.codec.name, made_of=text_digest(), why=why)

    @property
    def name(self) -> str:
        if self.projection is not None:
            return self.projection.name
        return "raw" if self.codec is None else self.codec.name


def choose_codec(config: CacheConfig, subject: Subject, *, tokenizer: Path, fingerprint: bytes) -> ChosenCodec:
    """Return the codec that the settings ask for. tokenizer: the model's `tokenizer.json`; fingerprint: the model's.
    Raises ModelRefused."""
    if config.codec == "raw" or config.mode != "attentionstore":
        return ChosenCodec()
    if config.codec == "activation":
        return ChosenCodec(projection=find_projection(subject))
    if subject.dtype not in _CODED_DTYPES:
        raise ModelRefused(f"cache.codec: KV in {subject.dtype} cannot be coded; take model.dtype bfloat16 or float32")
    return _transform(config, subject, tokenizer, fingerprint)


def coded_fingerprint(model: bytes, codec: str) -> bytes:
    """Return what names KV: that of the model, and of the codec if there is one. Coded KV and KV that was computed on
    it are never found by a server that codes otherwise, or not at all."""
    if codec == "raw":
        return model
    return blake2b(typed_fields("reprise-codec", model, codec), digest_size=len(model)).digest()


def selected_fingerprint(model: bytes, config: SelectorConfig) -> bytes:
    """Return what names KV: that of the model, and of the selector if there is one, behind which KV is another. A
    server that reads contexts otherwise, or whole, never finds it."""
    if config.name == "none":
        return model
    fields = typed_fields("reprise-selector", model, config.name, config.min_context, repr(config.share))
    return blake2b(fields, digest_size=len(model)).digest()


def _transform(config: CacheConfig, subject: Subject, tokenizer: Path, fingerprint: bytes) -> ChosenCodec:
    """Return the transform codec that keeps to the budget, or none and why. Raises ModelRefused."""
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
    """Calibrate now, and keep the result for later starts."""
    from reprise.engine.codec.calibration import calibrate
    from reprise.engine.codec.calibration_file import save
    from reprise.engine.codec.text import calibration_text

    log.info("calibrating the codec of KV for this model, once")
    started = time.perf_counter()
    learned, scored = calibration_text(tokenizer)
    made = calibrate(subject, budget=config.codec_budget, learned=learned, scored=scored)
    if made is None:
        return None
    size = sum(made.codec.segment_bytes) / (BLOCK_TOKENS * bytes_per_token(subject.found.shapes, subject.dtype))
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
