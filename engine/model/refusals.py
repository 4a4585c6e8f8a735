"""Says from a configuration alone why a model is not served. Pure.

The load-time probe finds the same and more, but only after the weights have been downloaded and read.
"""

from collections.abc import Iterable
from typing import Any

_STATES = frozenset(("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"))
"""Kinds of layers that keep a state besides K and V."""


_TYPES = {
    "kosmos-2.5": "kosmos-2.5 counts the positions of a text from 1, and this server from 0: its text would be wrong",
    "emu3": "transformers looks for the weights of emu3 under other names than its checkpoints have",
    "shieldgemma2": "shieldgemma2 classifies images and writes no text",
}
"""Types that the load-time probe does not see through: it passes positions to both sides, and makes its own weights."""


def refusal_of_type(model_type: str) -> str | None:
    """Return the reason why no model of a type is served; None if models of this type may be served."""
    return _TYPES.get(model_type)


def refusal_of(text: Any) -> str | None:
    """Return the reason why a language model is not served, and what is served instead; None if its configuration shows
    no such reason. text: transformers' configuration of the language model, for a multimodal model that of its text."""
    kinds = set(_layer_kinds(text))
    name = text.model_type
    indexer = ["index_topk"] if getattr(text, "index_topk", None) else []
    if sparse := sorted(kind for kind in kinds if _is_sparse(kind)) or indexer:
        return (
            f"the layers of {name} choose which tokens they read ({', '.join(sparse)}), which is not supported; models "
            "that read all tokens of their context run instead, such as glm4_moe, qwen3_moe, deepseek_v3 or minimax_m2"
        )
    if "chunked_attention" in kinds or getattr(text, "attention_chunk_size", None):
        return f"{name} attends in chunks, which is not supported"
    if states := sorted(kinds & _STATES):
        return (
            f"{name} has layers that keep a state besides K and V ({', '.join(states)}). States of linear-attention "
            "layers are not served yet: reused history would be wrong. A model whose layers all attend runs instead, "
            "such as qwen3, llama or gemma3"
        )
    return None


def _layer_kinds(text: Any) -> Iterable[str]:
    """Return the kinds of a language model's layers, as its configuration names them; none if it does not."""
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()


def _is_sparse(kind: str) -> bool:
    """Return whether layers of this kind read a part of their context that they choose. Plain "sparse" is a kind of
    MLP."""
    return kind == "indexed_attention" or kind.endswith("_sparse") or "_sparse_" in kind or "compressed_" in kind
