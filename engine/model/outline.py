"""Counts a model's weights and the KV of a token without loading it."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from reprise.engine.model.cpu.quantised_experts import PROJECTIONS
from reprise.engine.model.shape_run import run_shapes
from reprise.engine.model.text_of_wrapper import TextModel, on_meta
from reprise.kernels.packed import GROUP


@dataclass(frozen=True, slots=True)
class Outline:
    """The size of a model, in counts of numbers and not in bytes."""

    parameters: int  # all numbers; shared ones count once
    table_weights: int  # numbers in embeddings and heads, which packing leaves at 8 bits
    layer_weights: int  # numbers in linear layers and experts, which can be packed
    layers: int
    kv_numbers: int | None  # numbers in a token's K and V over all layers; None: not known without loading it
    kv_rows: int | None  # rows of one head in them


def outline_of(text: TextModel) -> Outline:
    """Count a model's weights and the KV numbers of a token, on the meta device, which needs no memory for weights."""
    model: Any = on_meta(text)
    tied = set(model.all_tied_weights_keys)
    tables = layers = total = 0
    for path, module in model.named_modules():
        for leaf, weight in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            if name in tied:
                continue
            total += weight.numel()
            if leaf == "weight" and type(module) in (nn.Linear, nn.Embedding) and weight.shape[1] % GROUP == 0:
                if "embed" in name or "head" in name:
                    tables += weight.numel()
                elif type(module) is nn.Linear and "router" not in name:
                    layers += weight.numel()
            elif leaf in PROJECTIONS and hasattr(module, "is_transposed") and weight.dim() == 3:
                layers += weight.numel() if weight.shape[1 if module.is_transposed else 2] % GROUP == 0 else 0
    num_layers: int = text.config.get_text_config().num_hidden_layers
    ran = run_shapes(model)
    is_whole = ran.error is None and len(ran.attended) == num_layers
    return Outline(
        parameters=total,
        table_weights=tables,
        layer_weights=layers,
        layers=num_layers,
        kv_numbers=sum(call.kv_heads * (call.k_dim + call.v_dim) for call in ran.attended) if is_whole else None,
        kv_rows=sum(2 * call.kv_heads for call in ran.attended) if is_whole else None,
    )
