"""Tiny configs of every type of language model and wrapper that transformers knows, and what becomes of each here.

A type takes those of the common sizes that its config has. Where these make no model, a type adds its own.
"""

import contextlib
import copy
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # before transformers is imported, see engine/__init__.py

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from reprise.engine.model.hf_model import prepare
from reprise.engine.model.loading import ModelRefused, read_config, text_of
from reprise.engine.model.probe import probe
from reprise.engine.model.text_of_wrapper import on_meta
from reprise.kernels.attention import BACKENDS
from tests.engine import wrappers
from tests.engine.models import KEEP_STATES, VOCAB, WINDOW, randomise
from tests.engine.paged import PAGE
from tests.engine.wrappers import IDS, TEXT, VISION, wrapper_config

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
_MOST_PARAMETERS = 30_000_000
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_COMMON: dict[str, Any] = {
    **TEXT,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    # The names that older types have for the same.
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "n_head": 4,
    "n_heads": 4,
    "n_embd": 64,
    "d_model": 64,
    "embedding_size": 64,
    "emb_dim": 64,
    "n_inner": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "dff": 96,
    "n_positions": 4096,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "n_ctx": 256,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_BETA = {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}
_ALONE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu", "axk1", "minicpm3"), _LATENT),
    **{name: {**_LATENT, "index_n_heads": 2, "index_head_dim": 16} for name in ("deepseek_v32", "glm_moe_dsa")},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon": {"alibi": False},
    "gemma3n_text": {
        **_SHARED_KV,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {**_SHARED_KV, "global_head_dim": 32},
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 4, "num_local_experts": 0},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {**_LATENT, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32},
    "mimo_v2_flash": {"swa_head_dim": 16, "swa_v_head_dim": 16, "v_head_dim": 16},
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3]},
    "ministral3": _BETA,
    "mistral4": {**_LATENT, **_BETA, "head_dim": 16},
    "opt": {"word_embed_proj_dim": 64},
    "phimoe": {"sliding_window": 4096},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "vaultgemma": {"query_pre_attn_scalar": 16},
    **{name: {**KEEP_STATES[name]} for name in ("falcon_h1", "jamba", "lfm2", "qwen3_next", "zaya")},
}
_M_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_FULL = {"rope_parameters": {**_M_ROPE, "mrope_section": [4, 2, 2]}}
_HALF = {"rope_parameters": {**_M_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
_TEXTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm_ocr", "glmga"), _HALF),
    **dict.fromkeys(("paddleocr_vl", "qwen2_5_omni_thinker", "cosmos3_edge"), _FULL),
    "dots3_note": {"num_key_value_heads": 4},
    "hunyuan_vl": {"rope_parameters": {**_M_ROPE, "mrope_section": [4, 2, 2]}},
    "ernie4_5_vl_moe": {"rope_parameters": {**_M_ROPE, "mrope_section": [3, 3, 2]}, "moe_intermediate_size": [32, 32]},
    "qwen3_omni_moe_thinker": {"sliding_window": None},
    "unlimited_ocr": {"num_key_value_heads": 4},
}
"""Entries that the text of a wrapper adds to the common sizes."""


class NoTinyModel(Exception):
    """No tiny model of a type could be made. The message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """The verdict on a type's tiny model. movable: whether its keys are, None if it is refused."""

    is_served: bool
    is_wrapper: bool = False
    movable: bool | None = None
    reason: str = ""


def tiny_config(model_type: str) -> Any:
    """Return the config of a tiny model. Raises an exception of transformers where the sizes do not fit together."""
    if (wrapper := wrappers.SERVED.get(model_type)) is not None:
        return wrapper_config(model_type, wrapper)
    if model_type in wrappers.REFUSED:
        return wrapper_config(model_type, wrappers.REFUSED[model_type][0])
    usual = AutoConfig.for_model(model_type)
    given: dict[str, Any] = {**_fitting(model_type, _COMMON), **_ALONE.get(model_type, {})}
    if "text_config" in usual.sub_configs:
        kind = getattr(usual.text_config, "model_type", None)
        sizes = {**_fitting(kind, _COMMON), **_ALONE.get(kind, {}), "model_type": kind} if kind else TEXT
        given = {**IDS, "text_config": {**sizes, **_TEXTS.get(model_type, {})}}
    if "vision_config" in usual.sub_configs:
        kind = getattr(usual.vision_config, "model_type", None)
        given["vision_config"] = _fitting(kind, VISION) | {"model_type": kind} if kind else dict(VISION)
    # Configurations write into what they are given, and types share some of it here.
    return AutoConfig.for_model(model_type, **copy.deepcopy(given))


def _fitting(model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return those of the sizes that configs of a type have."""
    usual = AutoConfig.for_model(model_type)
    names = {*usual.to_dict(), *usual.attribute_map, *_SPECIAL}
    return {name: value for name, value in sizes.items() if name in names}


def find_out(model_type: str) -> Found:
    """Load the tiny model of a type as the engine would, and probe it. Raises NoTinyModel."""
    try:
        config = tiny_config(model_type)
    except Exception as error:
        # Its text may be refused whatever its sizes.
        with contextlib.suppress(Exception):
            if (refused := _refusal(AutoConfig.for_model(model_type))) is not None:
                return refused
        raise NoTinyModel(f"{model_type}: {error}") from error
    if (refused := _refusal(config)) is not None:
        return refused
    try:
        text = text_of(config)
        if sum(parameter.numel() for parameter in on_meta(text).parameters()) > _MOST_PARAMETERS:
            raise NoTinyModel(f"{model_type}: it is not tiny")
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model: Any = text.make(torch.float32)
    except ModelRefused as refusal:
        if "cannot be made from its configuration" in str(refusal):
            raise NoTinyModel(str(refusal)) from refusal
        return Found(is_served=False, reason=str(refusal))
    except NoTinyModel:
        raise
    except Exception as error:
        raise NoTinyModel(f"{model_type}: {error}") from error
    randomise(model, 0)
    try:
        found = probe(prepare(model), BACKENDS["torch_cpu"](), PAGE)
    except ModelRefused as refusal:
        return Found(is_served=False, is_wrapper=text.is_wrapper, reason=str(refusal))
    return Found(is_served=True, is_wrapper=text.is_wrapper, movable=found.decouplable)


def _refusal(config: Any) -> Found | None:
    """Return the refusal of a config as it would stand in a directory; None if it is not refused."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            config.save_pretrained(directory)
            read_config(Path(directory))
        except ModelRefused as refusal:
            return Found(is_served=False, reason=str(refusal))
        except Exception:  # odd configs do not go through a file; what they are is found by making a model
            return None
    return None
