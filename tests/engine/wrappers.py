"""Tiny vision-language wrappers of many types, with their towers, built from their configs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.engine.models import VOCAB, WINDOW, randomise

IMAGE_ID = VOCAB - 9
IDS = {
    "image_token_id": IMAGE_ID,
    "image_token_index": IMAGE_ID,
    "video_token_id": IMAGE_ID + 1,
    "vision_start_token_id": IMAGE_ID + 2,
    "vision_end_token_id": IMAGE_ID + 3,
    "audio_token_id": IMAGE_ID + 4,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "depth": 2,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_channels": 3,
}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Entries that a wrapper's type adds to the common ones: in the config of its text, of its vision, and its own."""

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}
    return {"rope_parameters": parameters}


_SIGLIP = {"model_type": "siglip_vision_model"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_local_experts": 4,
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_DEEP = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_GEMMA4 = {
    **_SLIDING,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}

# The first, and every so many after it, are tried in `make test`: see the sweeps.
SERVED: dict[str, Wrapper] = {
    "qwen3_vl": Wrapper(_mrope(4, 2, 2, mrope_interleaved=True), _DEEP),
    "qwen3_vl_moe": Wrapper({**_mrope(4, 2, 2, mrope_interleaved=True), **_EXPERTS}, _DEEP),
    "qwen2_vl": Wrapper(_mrope(4, 2, 2)),
    "qwen2_5_vl": Wrapper(_mrope(4, 2, 2), {"fullatt_block_indexes": [1]}),
    "mistral3": Wrapper({"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", "head_dim": 16}),
    "llava": Wrapper({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "llava_next": Wrapper({"model_type": "mistral"}, {"model_type": "clip_vision_model"}),
    "llava_onevision": Wrapper({"model_type": "qwen2"}, _SIGLIP),
    "kimi_k25": Wrapper(
        {"model_type": "deepseek_v3", **_LATENT},
        {"merge_kernel_size": [2, 2], "init_pos_emb_height": 4, "init_pos_emb_width": 4},
    ),
    "gemma3": Wrapper(_SLIDING, _SIGLIP, {"mm_tokens_per_image": 4}),
    "gemma4": Wrapper(_GEMMA4, {"head_dim": 16}, {"audio_config": None}),
    "glm4v": Wrapper(_mrope(2, 1, 1, partial_rotary_factor=0.5)),
    "glm4v_moe": Wrapper(
        {
            **_mrope(2, 1, 1, partial_rotary_factor=0.5),
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
        }
    ),
    "internvl": Wrapper({"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [14, 14]}),
    "smolvlm": Wrapper({"model_type": "llama"}, own={"scale_factor": 1}),
    "idefics3": Wrapper({"model_type": "llama"}, own={"scale_factor": 1}),
    "cohere2_vision": Wrapper({"model_type": "cohere2", "sliding_window": WINDOW}, _SIGLIP),
    "aya_vision": Wrapper({"model_type": "cohere2", "sliding_window": WINDOW}, _SIGLIP),
    "paligemma": Wrapper({"model_type": "gemma"}, {**_SIGLIP, "projection_dim": 64}, {"projection_dim": 64}),
    "granite4_vision": Wrapper(
        vision={"model_type": "siglip_vision_model", "hidden_size": 64},
        own={"downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]], "spatial_target_layers": [1]},
    ),
}
"""Wrappers that are served as the text models in them."""

_LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
REFUSED: dict[str, tuple[Wrapper, str]] = {
    "qwen3_5": (Wrapper(_LINEAR, {"num_position_embeddings": 16}), "keep a state besides K and V"),
    "qwen3_5_moe": (Wrapper({**_LINEAR, **_EXPERTS}, {"num_position_embeddings": 16}), "keep a state besides K and V"),
    "llama4": (Wrapper({"attention_chunk_size": 128}), "attends in chunks"),
    "lfm2_vl": (
        Wrapper({"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"]}),
        "keep a state besides K and V",
    ),
    "minimax_m3_vl": (
        Wrapper({"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3]}),
        "choose which tokens they read",
    ),
    "qwen4_exp": (Wrapper(), "choose which tokens they read"),
    "glm5_next": (Wrapper({"num_key_value_heads": 4}), "choose which tokens they read"),
}
"""Wrappers whose text is refused, with a part of the sentence that says why."""


def wrapper_config(model_type: str, wrapper: Wrapper) -> Any:
    given: dict[str, Any] = {**IDS, **wrapper.own, "text_config": {**TEXT, **wrapper.text}}
    if wrapper.vision is not None:
        given["vision_config"] = {**VISION, **wrapper.vision}
    return AutoConfig.for_model(model_type, **given)


def whole_wrapper(model_type: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A random model in eval mode with its towers, as transformers makes it."""
    config = wrapper_config(model_type, SERVED[model_type])
    config._attn_implementation = "eager"
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    randomise(model, 0)
    return model.to(dtype).requires_grad_(False)


def save_wrapper(path: Path, model_type: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a whole wrapper as a user would have it. Returns the wrapper."""
    model = whole_wrapper(model_type, dtype=dtype)
    model.save_pretrained(path)
    return model
