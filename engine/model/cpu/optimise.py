"""Installs the faster modules of `modules` and `layer` in a loaded model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.cpu.last_layer import finish_wanted_rows_only
from engine.model.cpu.layer import is_gated_mlp, replace_layers
from engine.model.cpu.modules import (
    ExactLinear,
    GatedMlp,
    PackedLinear,
    PlainLinear,
    RmsNorm,
    SharedPart,
    SharedProduct,
    agree,
    packing_works,
)
from engine.model.probe import ProbeResult
from kernels.attention.ragged_batch import AttentionBackend

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(slots=True)
class Optimised:
    """Counts what was replaced, for the log."""

    layers: int = 0
    fused: int = 0
    packed: int = 0
    gated: int = 0
    norms: int = 0
    last: bool = False  # whether the last layer skips rows whose logits are not wanted


@torch.inference_mode()
def optimise_for_cpu(model: nn.Module, probed: ProbeResult, backend: AttentionBackend, exact: bool) -> Optimised:
    """Replace modules in place: whole decoder layers of the known kind, else known parts of them. Embeddings keep their
    own copy of a tied weight. exact: use bf16 products whose rows do not depend on how many there are; raises
    RuntimeError if there are none."""
    done = Optimised()
    pack = next(model.parameters()).dtype == torch.bfloat16 and packing_works()
    linear = (ExactLinear if exact else PackedLinear) if pack else PlainLinear
    if pack:
        done.layers = replace_layers(model, probed, backend, exact)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if pack and not exact and is_gated_mlp(child):
                replacement: nn.Module = GatedMlp(child.gate_proj, child.up_proj, child.down_proj)  # type: ignore[arg-type]
                done.gated += _replace(module, name, child.gate_proj.in_features, replacement)  # type: ignore[union-attr,arg-type]
            elif type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                weight: Tensor = child.weight  # type: ignore[assignment]
                replacement = RmsNorm(weight, child.variance_epsilon)  # type: ignore[arg-type]
                done.norms += _replace(module, name, weight.shape[0], replacement)
    for module in list(model.modules()):
        done.fused += sum(_fuse(module, names, linear) for names in _SIBLINGS)
        for name, child in list(module.named_children()):
            if pack and type(child) is nn.Linear:
                setattr(module, name, linear(child.weight, child.bias))
                done.packed += 1
    done.last = finish_wanted_rows_only(model, probed, backend)
    return done


def _replace(parent: nn.Module, name: str, width: int, replacement: nn.Module) -> bool:
    """Replace a child if both give the same result for random rows [1, 5, width]. Returns whether it was replaced."""
    child: nn.Module = getattr(parent, name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, width, generator=generator).to(next(child.parameters()).dtype)
    if not agree(replacement(x), child(x)):
        return False
    setattr(parent, name, replacement)
    return True


def _fuse(module: nn.Module, names: tuple[str, ...], linear: Callable[[Tensor, Tensor | None], nn.Module]) -> bool:
    """Combine sibling projections of one input into one product."""
    group = [m for m in (getattr(module, name, None) for name in names) if type(m) is nn.Linear]
    if len(group) < len(names) or len({m.in_features for m in group}) != 1:
        return False
    biases = [m.bias.data for m in group if m.bias is not None]
    if biases and len(biases) < len(group):
        return False
    weight = torch.cat([m.weight.data for m in group])
    shared = SharedProduct(linear(weight, torch.cat(biases) if biases else None), [m.out_features for m in group])
    for index, name in enumerate(names):
        setattr(module, name, SharedPart(shared, index))
    return True
