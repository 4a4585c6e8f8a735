"""GET /v1/models, /v1/models/{id} and /props: what clients read of the model. Each names its window in its own way."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from reprise.app.api.calls import engine_of, readiness_of, settings_of
from reprise.app.api.operation import described
from reprise.app.schemas.answers.server import Model, ModelList, Props
from reprise.app.settings.settings import Settings
from reprise.app.turn.ports import codec_in_use
from reprise.app.turn.readiness import Readiness
from reprise.engine.messages import ModelInfo, Stats

# A client that knows the window keeps so much of it free for an answer: a quarter, and no more than this. A longer
# answer is given too.
MAX_RESERVED_TOKENS = 16_384
# The names of a chat's parameters that clients look for before they send them.
PARAMETERS = (
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("response_format", "structured_outputs", "reasoning_effort"),
)
TOOL_PARAMETERS = ("tools", "tool_choice", "parallel_tool_calls")

router = APIRouter()


class ModelsQuery(BaseModel):
    client_version: str | None = Field(None, description="sent by Codex; adds `models`, empty")


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", **described("List the model and its aliases", ModelList, query=ModelsQuery))
async def list_models(request: Request) -> dict[str, Any]:
    """Each entry has the model's window under every name that clients look for, its default sampling, its capabilities
    and the results of the checks at start. `exact`: answers were proven not to depend on which requests run together.
    `template`: what the chat template does with messages that many templates do not expect."""
    readiness, settings = readiness_of(request), settings_of(request)
    model, stats = readiness.require_loaded(), engine_of(request).stats
    listed = [_describe(readiness, settings, model, name, stats) for name in readiness.names]
    return {"object": "list", "data": listed, **_for_codex(request)}


def _for_codex(request: Request) -> dict[str, Any]:
    """Return a field without which Codex refuses the list. It stays empty: an entry would have to bring instructions,
    and these would replace Codex's own."""
    return {"models": []} if "client_version" in request.query_params else {}


@router.get("/v1/models/{name:path}", **described("Get a model", Model))
async def get_model(request: Request, name: str) -> dict[str, Any]:
    readiness = readiness_of(request)
    return _describe(readiness, settings_of(request), readiness.find_model(name), name, engine_of(request).stats)


@router.get("/props", **described("Get the model's window as llama.cpp's server names it", Props))
async def get_props(request: Request) -> dict[str, Any]:
    model = readiness_of(request).require_loaded()
    return {
        "default_generation_settings": {"n_ctx": model.max_context},
        "total_slots": settings_of(request).scheduler.max_seqs,
        "model_alias": model.name,
        "modalities": {"vision": False, "audio": False},
    }


def _describe(
    readiness: Readiness, settings: Settings, model: ModelInfo, name: str, stats: Stats | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": readiness.loaded_s,
        "owned_by": "reprise",
        "root": model.name,
        "max_model_len": model.max_context,
        "context_length": model.max_context,
        "context_window": model.max_context,
        "max_output_tokens": min(model.max_context // 4, MAX_RESERVED_TOKENS),
        "meta": {
            "n_ctx": model.max_context,
            "n_ctx_train": model.own_context,
            "n_params": model.parameters,
            "n_vocab": model.vocab_size,
        },
        "supported_parameters": [*PARAMETERS, *(TOOL_PARAMETERS if readiness.takes_chats else ())],
        "architecture": model.architecture,
        "parameters": model.parameters,
        "num_layers": model.layers,
        "vocab_size": model.vocab_size,
        "dtype": model.dtype,
        "weights": model.weights or model.dtype,
        "device": model.device,
        "attention_backend": model.attention_backend,
        "default_sampling": msgspec.structs.asdict(readiness.sampling_defaults),
        "max_seqs": settings.scheduler.max_seqs,
        "capabilities": {
            "chat_completions": True,
            "streaming": True,
            "logprobs": True,
            "tools": readiness.takes_chats,
            "reasoning": readiness.form.found.thinks,
            "vision": False,
            "prefix_reuse": settings.cache.mode != "recompute",
            "positions_decoupled": model.decouplable,
            "truncation": _truncation(settings, model),
            **readiness.form.described,
        },
        "template": readiness.template_outcomes,
        "cache": {
            "fingerprint": model.fingerprint,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "hbm_bytes_per_token": model.hbm_bytes_per_token,
            "hbm_dtype": model.hbm_dtype or model.dtype,
            "hbm_divergence": model.hbm_divergence,
            "hbm_tokens": model.hbm_tokens,
            "block_size": model.block_size,
            "page_size": model.page_size,
            "codec": _codec(settings, model, stats),
        },
        "selector": {
            "name": model.selector,
            "min_context": settings.selector.min_context,
            "share": settings.selector.share,
        },
        "exact": {"proven": model.exact, "detail": model.exactness},
        "probe": {"logit_error": model.logit_error, "logit_tolerance": model.logit_tolerance},
        "warnings": list(model.warnings),
    }


def _codec(settings: Settings, model: ModelInfo, stats: Stats | None) -> dict[str, Any]:
    checks = None if stats is None else stats.codec_checks
    # The budget bounds what was measured. A codec that was not measured keeps to none.
    budget = {} if model.codec_divergence is None else {"budget": settings.cache.codec_budget}
    return {
        "name": model.codec,
        "bytes": model.coded_bytes,
        **budget,
        "divergence": model.codec_divergence,
        "is_on": codec_in_use(model, stats) != "raw",
        "checks": 0 if checks is None else sum(checks.counts),
        "recent_divergence": None if checks is None else checks.recent,
    }


def _truncation(settings: Settings, model: ModelInfo) -> str:
    """Return what truncation does when a window is full: "decoupled" (the cached KV is kept at new positions),
    "recompute" (the KV is computed again), or "disabled" (400, unless a request asks for truncation)."""
    cache, mode = settings.cache, settings.experiment.truncation_mode
    if cache.truncation == "disabled":
        return "disabled"
    if mode == "decoupled" and (cache.mode == "recompute" or not model.decouplable):
        return "recompute"
    return mode
