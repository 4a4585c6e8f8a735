"""Installs fused norms, gates and products in a loaded model, wherever they give the same result.

A step of few rows launches as many kernels as one of many, each of which takes 2 us and more on the device, and 5 to 10
on the processor where no graph is replayed. An 8 B model of 32 layers launches some 40 a layer as transformers writes
it, and 20 with these.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.known_parts import is_gated_mlp, replace_child, share_product
from kernels.triton_kernels import triton_rows

_SIBLINGS, _GATE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
Kernel = Callable[..., Tensor]


@dataclass(slots=True)
class Optimised:
    """Counts what was replaced, for the log."""

    norms: int = 0
    gated: int = 0
    fused: int = 0


class RmsNorm(nn.Module):
    """Computes weight * x / rms(x) in one pass."""

    def __init__(self, weight: Tensor, eps: float, norm: Kernel) -> None:
        super().__init__()
        self.weight, self.eps, self._norm = weight, eps, norm

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)


class GatedMlp(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), with one product for gate and up."""

    def __init__(self, mlp: nn.Module, gated: Kernel) -> None:
        super().__init__()
        gate, up = (getattr(mlp, name) for name in _GATE)
        bias = torch.cat((gate.bias, up.bias)) if gate.bias is not None else None
        self.both, self._gated = _linear(torch.cat((gate.weight, up.weight)), bias), gated
        self.down_proj: nn.Module = mlp.down_proj  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._gated(self.both(x)))
        return out


@torch.no_grad()
def optimise_for_cuda(model: nn.Module) -> Optimised:
    """Replace modules in place; nothing without Triton. Weights that are joined take their memory twice for the time
    of one module."""
    done, kernels = Optimised(), triton_rows()
    if kernels is None:
        return done
    for module in _one_by_one(model):
        for name, child in list(module.named_children()):
            weight = getattr(child, "weight", None)
            eps = getattr(child, "variance_epsilon", None)
            if type(child).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(eps, float):
                if kernels.takes_norm(weight.shape[0]):
                    done.norms += replace_child(module, name, weight.shape[0], RmsNorm(weight, eps, kernels.norm))
            elif is_gated_mlp(child):
                gate, up = (getattr(child, name) for name in _GATE)
                if (gate.bias is None) == (up.bias is None):
                    done.gated += replace_child(module, name, gate.in_features, GatedMlp(child, kernels.gated))
    for module in _one_by_one(model):
        done.fused += share_product(module, _SIBLINGS, _linear)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what was joined lay in pieces that nothing else fits
    return done


def _one_by_one(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, none of which is kept alive, so that what is replaced frees its weights at once."""
    for name in [name for name, _ in model.named_modules()]:
        with suppress(AttributeError):  # a part of one that was replaced
            yield model.get_submodule(name)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined
