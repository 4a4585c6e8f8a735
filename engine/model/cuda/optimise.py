"""Installs whole layers, or else fused norms, gates and products, in a loaded model, wherever they give the same
result.

A step of few rows launches as many kernels as one of many. Each takes at least 2 us on the device, and 5 to 10 on the
processor where no graph is replayed. An 8 B model of Llama's kind launches 33 a layer with transformers' code, 15 with
our norms, gates and products, and 10 with whole layers.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from reprise.engine.model.cuda.layer import CudaLayer, joined, linear
from reprise.engine.model.cuda.quantised import CudaQuantisedLinear
from reprise.engine.model.known_layers import check_positions, known_layer, layers_in_lists, same_answer
from reprise.engine.model.known_parts import is_gated_mlp, replace_child, share_product
from reprise.engine.model.probe import ProbeResult
from reprise.kernels.attention.ragged_batch import AttentionBackend, PageFormat
from reprise.kernels.triton_kernels import triton_rows

_SIBLINGS, _GATE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
Kernel = Callable[..., Tensor]


@dataclass(slots=True)
class Optimised:
    """The numbers of replaced modules, for the log."""

    layers: int = 0
    norms: int = 0
    gated: int = 0
    fused: int = 0


class RmsNorm(nn.Module):
    """A module that computes weight * x / rms(x) in one pass."""

    def __init__(self, weight: Tensor, eps: float, norm: Kernel) -> None:
        super().__init__()
        self.weight, self.eps, self._norm = weight, eps, norm

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)


class GatedMlp(nn.Module):
    """A module that computes down(silu(gate(x)) * up(x)), with one product for gate and up."""

    def __init__(self, mlp: nn.Module, gated: Kernel) -> None:
        super().__init__()
        self.both, self._gated = joined([getattr(mlp, name) for name in _GATE]), gated
        self.down_proj: nn.Module = mlp.down_proj  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._gated(self.both(x)))
        return out


@torch.no_grad()
def optimise_for_cuda(model: nn.Module, probed: ProbeResult, backend: AttentionBackend) -> Optimised:
    """Replace modules in place; do nothing without Triton. In 16 bits decoder layers of Llama's kind (`known_layers`)
    are replaced as a whole; a sum in them may be rounded once instead of twice. While a module's weights are joined,
    they take their memory twice.
    """
    done, kernels = Optimised(), triton_rows()
    if kernels is None:
        return done
    if next(model.parameters()).dtype in (torch.bfloat16, torch.float16):
        done.layers = _replace_layers(model, probed, backend, kernels)
    for module in _one_by_one(model):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):  # only then: looking at a packed weight unpacks it
                weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", None)
                if isinstance(weight, Tensor) and isinstance(eps, float) and kernels.takes_norm(weight.shape[0]):
                    done.norms += replace_child(module, name, weight.shape[0], RmsNorm(weight, eps, kernels.norm))
            elif is_gated_mlp(child):
                gate, up = (getattr(child, name) for name in _GATE)
                if (gate.bias is None) == (up.bias is None):
                    done.gated += replace_child(module, name, gate.in_features, GatedMlp(child, kernels.gated))
    for module in _one_by_one(model):
        done.fused += share_product(module, _SIBLINGS, linear)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what was joined lay in pieces that nothing else fits
    return done


def _replace_layers(model: nn.Module, probed: ProbeResult, backend: AttentionBackend, kernels: ModuleType) -> int:
    """Replace the decoder layers of Llama's kind (`known_layers`), in place. Returns how many were replaced."""
    replaced, positions = 0, check_positions(model)
    for container, place, index in layers_in_lists(model):
        layer, shape = container[place], probed.shapes[index]
        known = known_layer(layer, probed.ropes[index], (nn.Linear, CudaQuantisedLinear))
        if known is None or shape.k_dim != shape.v_dim or not kernels.takes_norm(known.norms[0].weight.shape[0]):
            continue
        ours = CudaLayer(known, index, probed.params[index], kernels)
        if same_answer(ours, layer, index, probed, backend, positions, PageFormat(known.norms[0].weight.dtype)):
            container[place] = ours
            replaced += 1
    return replaced


def _one_by_one(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model and keep none of them alive, so that a replaced module frees its weights at once."""
    for name in [name for name, _ in model.named_modules()]:
        with suppress(AttributeError):  # a part of one that was replaced
            yield model.get_submodule(name)
