"""Tiny models of many families, built from their configs.

No parameter keeps a value that would hide a mistake: with norm weights of 1 and biases of 0, many models output
zeros.
"""

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # before transformers is imported, see engine/__init__.py

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from reprise.engine.model.hf_model import attention_implementation

WINDOW = 24  # size of every sliding window here: smaller than a page, and than most texts
VOCAB = 199
RARE = VOCAB - 1  # a token that random texts do not have
CPU = torch.device("cpu")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model type, what its config adds to the common one, and what the probe should say of it."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    decouplable: bool = True
    plain_layers: tuple[int, ...] = ()  # layers that do not rotate
    windows: tuple[int, ...] = ()  # layers that slide a window


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_EVERY_LAYER = (0, 1, 2, 3)
_ALTERNATE = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": Family(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_yarn": Family("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama_linear": Family("llama", _rope("linear", factor=4.0)),
    "qwen2": Family("qwen2"),
    "qwen2_sliding": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}, windows=(2, 3)
    ),
    "qwen3": Family("qwen3", {"head_dim": 32}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}, windows=_EVERY_LAYER),
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
        windows=(0, 2),
    ),
    "gemma3_text": Family(
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 24},
        windows=(0, 2),
    ),
    "phi3": Family("phi3", {**_rope("default", partial_rotary_factor=0.5), "head_dim": 16}),
    "phi3_long": Family(
        "phi3",
        {
            "head_dim": 16,
            "original_max_position_embeddings": 256,
            **_rope(
                "longrope",
                partial_rotary_factor=0.5,
                attention_factor=1.3,
                short_factor=[1.0, 1.5, 2.0, 2.5],
                long_factor=[4.0] * 4,
                original_max_position_embeddings=256,
            ),
        },
    ),
    "gpt_neox": Family("gpt_neox"),
    "olmo2": Family("olmo2"),
    "cohere2": Family("cohere2", {"sliding_window": WINDOW, "logit_scale": 0.5}, plain_layers=(3,), windows=(0, 1, 2)),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, plain_layers=(1, 3)),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
        windows=(0, 2),
    ),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}, windows=_EVERY_LAYER),
    "granite": Family(
        "granite",
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    "stablelm": Family("stablelm", {**_rope("default", partial_rotary_factor=0.25), "use_qkv_bias": True}),
    "phi": Family("phi", _rope("default", partial_rotary_factor=0.5)),
    "opt": Family(
        "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, decouplable=False, plain_layers=_EVERY_LAYER
    ),
    "gpt2": Family("gpt2", decouplable=False, plain_layers=_EVERY_LAYER),
}  # fmt: skip

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KEEP_STATES: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
    "jamba": {
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {
        **_EXPERTS,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "zaya": {**_EXPERTS, "num_experts_per_tok": 1, "head_dim": 16, "router_hidden_size": 16},
    "glm_moe_dsa": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
}
"""Configs of model types whose layers remember something besides K and V."""
IGNORE_OUR_ATTENTION = ("falcon", "gptj", "bloom")  # they attend by themselves and never ask


def tiny_model(model_type: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model in eval mode, as transformers makes it: attention not taken over."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, **changes})
    config._attn_implementation = "eager"
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)  # equal seeds are equal models
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model.to(dtype).requires_grad_(False)


def family_model(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    return tiny_model(family.model_type, **{**family.config, **changes})


def large_key_biases() -> Any:
    """Shaped as Qwen2 is, with some key channels of 200."""
    model = tiny_model("qwen2")
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        bias[1::4] = 200 * bias[1::4].sign()
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights large enough for attention to be far from uniform; biases, norm weights and sinks away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("sinks"):
            parameter.copy_(noise)
        elif name.endswith(("A_log", "dt_bias", ".D")):
            parameter.copy_(noise * 0.5)  # decays of 0.3 to 0.9: a lost state shows for many tokens
        elif parameter.dim() < 2:
            parameter.add_(noise, alpha=0.3)
        elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of no special meaning."""
    rng = random.Random(seed)
    return [rng.randrange(3, RARE) for _ in range(count)]


@torch.inference_mode()
def vanilla_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocab] of transformers' own eager attention, the text in one piece."""
    with attention_implementation(model, "eager"):
        logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def copied(model: Any) -> Any:
    """An independent model of the same weights."""
    return copy.deepcopy(model)


def save_tiny(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model directory as a user would have it. Returns `path`."""
    tiny_model(seed=seed, **changes).save_pretrained(path)
    return path
