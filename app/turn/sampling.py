"""Decides how an answer is sampled: as the request says, else as the model's makers recommend, else as OpenAI does.

The recommendation is the model's generation_config.json, read as vLLM reads it (`--generation-config auto`). The file
comes from elsewhere, so a value that cannot be used is left out and reported, and nothing fails because of it.
"""

import json
import math
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from reprise.app.schemas.fields import GenerationRequest
from reprise.engine.messages import SamplingParams

FILE = "generation_config.json"
MAX_FILE_BYTES = 1 << 20
# Field of the file -> whether a value can be used. The ranges are those of a request's fields.
_FITS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 <= value <= 1,
    "top_k": lambda value: -1 <= value < 1 << 31 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0.01 <= value <= 10,
}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values for a request that sets none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI = SamplingDefaults()


def read_defaults(directory: Path) -> tuple[SamplingDefaults, list[str]]:
    """Read the sampling defaults of the model in `directory`. Returns (defaults, messages about what is wrong with
    their file). Blocks."""
    path = directory / FILE
    try:
        if not path.is_file():
            return OPENAI, []
        if path.stat().st_size > MAX_FILE_BYTES:
            return OPENAI, [f"{FILE} is too large and was not read"]
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return OPENAI, [f"{FILE} cannot be read: {type(error).__name__}"]
    if not isinstance(said, dict):
        return OPENAI, [f"{FILE} is no object and was not read"]
    given = {name: said[name] for name in _FITS if said.get(name) is not None}
    usable = {name: value for name, value in given.items() if _is_number(value) and _FITS[name](value)}
    problems = [f"{FILE}: {name} {given[name]!r:.40} is not used" for name in given if name not in usable]
    if "top_k" in usable:
        usable["top_k"] = max(int(usable["top_k"]), 0)
    return SamplingDefaults(**usable), problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def sampling(request: GenerationRequest, defaults: SamplingDefaults, *, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a request. Fields that the request does not set take `defaults`; its presence
    and frequency penalties are then 0."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    seed = secrets.randbits(64) if request.seed is None else request.seed & (1 << 64) - 1
    return SamplingParams(
        temperature=given(request.temperature, defaults.temperature),
        top_p=max(given(request.top_p, defaults.top_p), 1e-6),  # 0 asks for the likeliest token alone
        top_k=max(defaults.top_k if request.top_k is None else request.top_k, 0),
        min_p=given(request.min_p, defaults.min_p),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=request.logit_bias or {},
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos or False,
        logprobs=request.answer_logprobs,
    )
