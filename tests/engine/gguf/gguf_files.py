"""Writes GGUF files of random models as llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "1 2"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *("".join(merge.split(" ")) for merge in MERGES), "<think>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
F32 = GGMLQuantizationType.F32
# Where the float16 scales of a block lie: random bytes there would be infinite now and then.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(TOKENS), "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_qwen2() -> PreTrainedModel:
    """Biases of queries, keys and values, and rows in transformers' own order."""
    torch.manual_seed(0)
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
    changes: dict[str, Any] | None = None,
    add: dict[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """`changes` replaces metadata, or leaves it out where it is None; `add` and `leave_out` are about tensors."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config, architecture), **(changes or {})}.items():
        _put(writer, key, value)
    weights = {_name(name): tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["output.weight"]
    for name, weight in {**weights, **(add or {})}.items():
        if name in leave_out:
            continue
        heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
        for ending, count in heads.items():
            if architecture == "llama" and name.endswith(ending):
                halves = weight.reshape(count, 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if weight.ndim == 1 or kind is F32:
            writer.add_tensor(name, np.ascontiguousarray(weight, dtype=np.float32))
        else:
            writer.add_tensor(name, stored(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(weight: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantised; where the library only reads a kind, random blocks of it."""
    scales = _SCALES.get(kind.name)
    if scales is None:
        return gguf.quants.quantize(np.ascontiguousarray(weight), kind)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (weight.size // block, size), dtype=np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    sizes = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
    }  # fmt: skip
    rope = config.rope_parameters
    return {
        "general.name": "a test",
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _name(name: str) -> str:
    known = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    known["lm_head.weight"] = "output.weight"
    if name in known:
        return known[name]
    _, _, layer, rest = name.split(".", 3)
    module, ending = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{ending}"
