"""Chooses the number type of KV in HBM, and measures at the first start how much that type changes answers."""

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from reprise.cache.blocks.keys import typed_fields
from reprise.engine.codec.quality import Subject, pages_quality
from reprise.engine.codec.text import calibration_text, text_digest
from reprise.engine.config import CacheConfig
from reprise.engine.model.loading import ModelRefused
from reprise.kernels.attention.ragged_batch import PageFormat
from reprise.kernels.int8_pages.pages import INT8_PAGES

log = logging.getLogger(__name__)

_VERSION = 1  # version of the packing, and of its measurement


@dataclass(frozen=True, slots=True)
class ChosenPages:
    """The chosen format of pages in HBM: numbers as computed, or packed as int8. divergence: nats per token by which
    the format changes answers of this model; None: it changes nothing. warning: text for people, if the settings asked
    for a format that was not chosen."""

    format: PageFormat
    divergence: float | None = None
    warning: str | None = None

    @property
    def is_packed(self) -> bool:
        return self.format.kind.is_packed


class _Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The stored result of measuring how much int8 pages change answers."""

    divergence: float  # nats a token
    made_of: str  # digest of the text
    version: int = _VERSION


def choose_pages(config: CacheConfig, subject: Subject, *, tokenizer: Path, fingerprint: bytes) -> ChosenPages:
    """Return the format of KV pages in HBM that the settings ask for; the model's own dtype instead of int8 if int8
    changes answers by more than `cache.codec_budget`. tokenizer: path of the model's `tokenizer.json`; fingerprint:
    bytes that identify the model. Raises ModelRefused if the model or the device cannot have int8 pages."""
    if config.hbm_dtype != "int8":
        return ChosenPages(PageFormat(subject.dtype))
    if next(subject.model.parameters()).device.type != "cpu" or subject.dtype != torch.bfloat16:
        raise ModelRefused("cache.hbm_dtype int8: pages of int8 are read on CPU and with model.dtype bfloat16 only")
    if any(dim % 2 for shape in subject.found.shapes for dim in (shape.k_dim, shape.v_dim)):
        raise ModelRefused("cache.hbm_dtype int8 does not fit this model, whose heads have an odd number of dims")
    path = Path(config.disk_dir) / "codecs" / f"{fingerprint.hex()}-int8-pages.json" if config.disk_dir else None
    divergence = None if path is None else _read(path)
    if divergence is None:
        divergence = _measured(subject, tokenizer, path)
    if not divergence <= config.codec_budget:  # not a number is too much as well
        return ChosenPages(
            PageFormat(subject.dtype),
            warning=f"cache.hbm_dtype: pages of int8 change answers of this model by {divergence:.2g} nats a token, "
            f"cache.codec_budget is {config.codec_budget:g}; pages stay {str(subject.dtype).removeprefix('torch.')}",
        )
    return ChosenPages(INT8_PAGES, divergence)


def paged_fingerprint(model: bytes, pages: ChosenPages) -> bytes:
    """Return the fingerprint under which KV is stored: the model's, combined with the format of its pages if they are
    packed as int8, because packed pages change the KV computed after them."""
    if not pages.is_packed:
        return model
    return blake2b(typed_fields("reprise-pages", model, "int8", _VERSION), digest_size=len(model)).digest()


def _measured(subject: Subject, tokenizer: Path, path: Path | None) -> float:
    """Measure how much int8 pages change answers, in nats per token, and write the result to `path` for later
    starts."""
    log.info("measuring what pages of int8 change of this model's answers, once")
    started = time.perf_counter()
    _, texts = calibration_text(tokenizer)
    quality = pages_quality(subject, texts, INT8_PAGES)
    log.info(
        "pages of int8: %.5f nats a token, %.2f %% of choices are other ones; %.0f s",
        quality.mean_divergence,
        100 * (1 - quality.same_choices),
        time.perf_counter() - started,
    )
    if path is not None:
        _keep(path, _Measured(divergence=quality.mean_divergence, made_of=text_digest()))
    return quality.mean_divergence


def _keep(path: Path, measured: _Measured) -> None:
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(measured))
        new.replace(path)
    except OSError as error:
        log.warning("what pages of int8 change was not kept, the next start measures it anew: %s", error)
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _read(path: Path) -> float | None:
    """Return the divergence, in nats per token, that an earlier start has measured; None if there is none that is still
    valid."""
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=_Measured)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    is_ours = measured.version == _VERSION and measured.made_of == text_digest()
    return measured.divergence if is_ours and 0 <= measured.divergence < float("inf") else None
