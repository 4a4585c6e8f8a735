"""Runs a short text through a model that has no memory for its weights, to see which of its modules text calls and
which KV a token has. Works on the meta device, in a fraction of a second even for the largest models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

_NAME = "reprise_shape_only"
_TEXT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Attended:
    """One call of attention. kv_heads, k_dim, v_dim: the shape of a token's K and V."""

    module: nn.Module
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """The modules and attention that a short text calls. error: what ended the run early; None: nothing did."""

    called: set[nn.Module]
    attended: list[Attended]
    error: Exception | None


@torch.no_grad()
def run_shapes(model: nn.Module) -> ShapeRun:
    """Run a short text through a model on the meta device, and return the modules and attention calls that it used.
    Changes the model's attention implementation."""
    called: set[nn.Module] = set()
    attended: list[Attended] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        """Return what attention would, without numbers."""
        attended.append(Attended(module, key.shape[1], key.shape[-1], value.shape[-1]))
        batch, heads, rows, _dim = query.shape
        return query.new_empty(batch, rows, heads, value.shape[-1]), None

    handles = [m.register_forward_pre_hook(lambda module, _: called.add(module)) for m in model.modules()]
    ids = torch.zeros(1, _TEXT_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(_TEXT_TOKENS, device="meta")[None]
    try:
        AttentionInterface.register(_NAME, attend)
        config: Any = model.config
        config._attn_implementation = _NAME  # transformers builds no mask for an attention of this name
        model(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception as error:
        return ShapeRun(called, attended, error)
    finally:
        for handle in handles:
            handle.remove()
    return ShapeRun(called, attended, None)
