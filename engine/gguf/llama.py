"""Reads Llama-shaped GGUF files: the names of their weights and the matching configuration.

llama.cpp stores the rows of `attn_q` and `attn_k` in another order than transformers, because its rotation turns
neighbouring dims and transformers' turns halves. Reading restores the order; nothing else is changed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprise.engine.gguf.blocks import codes_of
from reprise.engine.gguf.reader import GgufFile, GgufRefused, TensorInfo
from reprise.kernels.packed import Codes, PackedWeight, pack

ARCHITECTURE = "llama"
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's scaling of positions, except for the factor; all of its models share these values.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_F32, _F16 = 0, 1


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: its name in transformers, and the name and shape that it must have in the GGUF file."""

    name: str
    shape: tuple[int, ...]
    rotated_heads: int = 0  # heads whose rows are in llama.cpp's order; 0: keep the order


@dataclass(frozen=True, slots=True)
class LlamaShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rope: dict[str, Any]  # transformers' rope_parameters
    norm_epsilon: float
    tied: bool

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield (name in the file, weight) for all weights."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", Weight("model.embed_tokens.weight", (self.vocab, hidden))
        for layer in range(self.layers):
            for name, weight in (
                ("attn_norm", Weight("input_layernorm", (hidden,))),
                ("attn_q", Weight("self_attn.q_proj", (queries, hidden), rotated_heads=self.heads)),
                ("attn_k", Weight("self_attn.k_proj", (keys, hidden), rotated_heads=self.kv_heads)),
                ("attn_v", Weight("self_attn.v_proj", (keys, hidden))),
                ("attn_output", Weight("self_attn.o_proj", (hidden, queries))),
                ("ffn_norm", Weight("post_attention_layernorm", (hidden,))),
                ("ffn_gate", Weight("mlp.gate_proj", (self.intermediate, hidden))),
                ("ffn_up", Weight("mlp.up_proj", (self.intermediate, hidden))),
                ("ffn_down", Weight("mlp.down_proj", (hidden, self.intermediate))),
            ):
                full = Weight(f"model.layers.{layer}.{weight.name}.weight", weight.shape, weight.rotated_heads)
                yield f"blk.{layer}.{name}.weight", full
        yield "output_norm.weight", Weight("model.norm.weight", (hidden,))
        if not self.tied:
            yield "output.weight", Weight("lm_head.weight", (self.vocab, hidden))

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the content of config.json, without token ids."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_parameters": self.rope,
            "rms_norm_eps": self.norm_epsilon,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": str(dtype).removeprefix("torch."),
        }


def read_shape(file: GgufFile) -> LlamaShape:
    """Return the model's dimensions (layers, heads, widths) from the file's metadata. Raises GgufRefused if the file's
    tensors do not have these sizes."""

    def size(key: str, default: int | None = None) -> int:
        value = file.get(f"{ARCHITECTURE}.{key}", int, default)
        if value is None or not 1 <= value < 1 << 31:
            raise GgufRefused(f"{file.path}: {ARCHITECTURE}.{key} is missing, or no size: {value}")
        return int(value)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufRefused(f"{file.path}: there is no token_embd.weight with two dimensions")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // heads)
    kv_heads = size("attention.head_count_kv", heads)
    if file.get(f"{ARCHITECTURE}.expert_count", int, 0):
        raise GgufRefused(f"{file.path}: mixtures of experts are not converted")
    if (
        head_dim % 2
        or heads % kv_heads
        or not head_dim == size("rope.dimension_count", head_dim) == size("attention.value_length", head_dim)
    ):
        raise GgufRefused(f"{file.path}: heads of this shape are no Llama's")
    epsilon = file.get(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float)
    if epsilon is None or not 0 < epsilon < 1:
        raise GgufRefused(f"{file.path}: {ARCHITECTURE}.attention.layer_norm_rms_epsilon is missing or odd")
    shape = LlamaShape(
        hidden=hidden,
        layers=size("block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size("feed_forward_length"),
        vocab=embedding.shape[0],
        context=size("context_length"),
        rope=_rope(file, head_dim),
        norm_epsilon=_short(epsilon),
        tied="output.weight" not in file.tensors,
    )
    _check(file, shape)
    return shape


def _check(file: GgufFile, shape: LlamaShape) -> None:
    """Check that every weight is there in its shape, and no other. Raises GgufRefused."""
    if shape.layers > len(file.tensors):
        raise GgufRefused(f"{file.path}: {len(file.tensors)} tensors are too few for {shape.layers} layers")
    wanted = dict(shape.weights())
    for name, weight in wanted.items():
        found = file.tensors.get(name)
        if found is None:
            raise GgufRefused(f"{file.path}: tensor {name} is missing")
        if found.shape != weight.shape:
            wants = f"{list(weight.shape)} is wanted"
            raise GgufRefused(f"{file.path}: tensor {name} has the shape {list(found.shape)}, {wants}")
    if unknown := file.tensors.keys() - wanted.keys() - {_ROPE_FACTORS}:
        raise GgufRefused(f"{file.path}: tensor {min(unknown)[:60]!r} does not belong to a Llama model")


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return transformers' rope_parameters. Raises GgufRefused for a scaling that cannot be represented exactly."""
    theta = _short(file.get(f"{ARCHITECTURE}.rope.freq_base", float, 10_000.0))
    scaling = file.get(f"{ARCHITECTURE}.rope.scaling.type", str, "none")
    if not (math.isfinite(theta) and theta > 0):
        raise GgufRefused(f"{file.path}: {ARCHITECTURE}.rope.freq_base is {theta}")
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        factor = _llama3_factor(file, factors, theta, head_dim)
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    if scaling == "linear":
        factor = _short(file.get(f"{ARCHITECTURE}.rope.scaling.factor", float, 1.0))
        if not 1 <= factor <= 1024:
            raise GgufRefused(f"{file.path}: positions scaled by {factor}")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise GgufRefused(f"{file.path}: positions scaled by the method {scaling[:40]!r} are not converted")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_factor(file: GgufFile, info: TensorInfo, theta: float, head_dim: int) -> float:
    """Return the factor of Llama 3's scaling. The file has only the resulting factor of each frequency."""
    if info.shape != (head_dim // 2,):
        raise GgufRefused(f"{file.path}: {_ROPE_FACTORS} has the shape {list(info.shape)}")
    given = np.concatenate([rows[0] for _, rows in file.rows(info)])
    factor = _short(float(given.max()))
    low, high, original = _LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if factor < 1 or not np.allclose(given, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise GgufRefused(f"{file.path}: {_ROPE_FACTORS} is not what Llama 3 scales its positions by")
    return factor


def _short(value: float) -> float:
    """Return the number that has the fewest digits among those that float32 stores as `value`: 1e-05 instead of
    9.999999747378752e-06."""
    return float(str(np.float32(value)))


def dtype_of(file: GgufFile) -> torch.dtype:
    """Return the dtype to convert a file's weights to: float32 or float16 if all its matrices are stored in that type;
    otherwise bfloat16, which suits weights that were already rounded to 4 to 8 bits."""
    kinds = {info.kind for info in file.tensors.values() if len(info.shape) > 1}
    return {frozenset({_F32}): torch.float32, frozenset({_F16}): torch.float16}.get(frozenset(kinds), torch.bfloat16)


def read_weight(file: GgufFile, info: TensorInfo, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Read a weight, with its rows in transformers' order. Raises GgufRefused."""
    out = torch.empty(info.shape, dtype=dtype)
    flat = out.view(-1, info.shape[-1])
    for first, rows in file.rows(info):
        flat[first : first + len(rows)] = torch.from_numpy(rows)
    return _in_order(out, weight)


def keep_weight(file: GgufFile, info: TensorInfo, weight: Weight) -> PackedWeight:
    """Read a weight whose format `is_kept`, packed as it is in the file, with its rows in transformers' order. Raises
    GgufRefused."""
    try:
        found = codes_of(info.kind, torch.from_numpy(file.raw_rows(info)))
        codes, scales = _in_order(found.codes, weight), _in_order(found.scales, weight)
        lows = None if found.lows is None else _in_order(found.lows, weight)
        return pack(Codes(codes, scales, lows, found.bits))
    except ValueError as error:
        raise GgufRefused(f"{file.path}: tensor {info.name}: {error}") from None


def _in_order(rows: Tensor, weight: Weight) -> Tensor:
    """Return weight rows [outputs, ...] of the file in transformers' order."""
    if not weight.rotated_heads:
        return rows
    return rows.view(weight.rotated_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
