"""Computes a whole decoder layer on CUDA, of the kind used by Llama, Mistral, Qwen2, Qwen3, Phi-3 and others.

The model's own code launches 33 kernels a layer (Llama) to 45 (Qwen3), one after the other from Python; this launches
ten. `optimise` replaces layers by it if it gives the same results.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from reprise.engine.model.cuda.quantised import CudaQuantisedLinear, join_packed
from reprise.engine.model.hf_model import current_step, in_part
from reprise.engine.model.known_layers import KnownLayer
from reprise.kernels.attention.ragged_batch import AttentionParams


class CudaLayer(nn.Module):
    """A decoder layer: hidden [1, tokens, width] -> the same shape, inside a step. Takes the arguments of a
    transformers layer; uses the rotary tables and the current step."""

    def __init__(self, known: KnownLayer, index: int, params: AttentionParams, kernels: ModuleType) -> None:
        """Take over the weights of a layer. kernels: the module `reprise.kernels.triton_rows`."""
        super().__init__()
        self.index, self._params, self._head_dim, self._kernels = index, params, known.head_dim, kernels
        self._norm, self._post_norm = (_weight_and_eps(norm) for norm in known.norms)
        self._head_norms: tuple[Tensor, float, Tensor, float] | None = None
        if known.head_norms is not None:
            self._head_norms = (*_weight_and_eps(known.head_norms[0]), *_weight_and_eps(known.head_norms[1]))
        self._qkv, self._gate_up = joined(known.qkv), joined(known.gate_up)
        self._out, self._down = known.out, known.down

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        kernels, hidden = self._kernels, hidden_states[0]
        total: Tensor
        mixed = self._attend(kernels.norm(hidden, *self._norm), *position_embeddings)
        total, normed = kernels.add_norm(hidden, self._out(mixed), *self._post_norm)
        gated = kernels.gated(self._gate_up(normed))
        if isinstance(self._down, CudaQuantisedLinear):
            total = self._down(gated, total)
        elif self._down.bias is None:
            total.addmm_(gated, self._down.weight.T)  # the sum within the product, and rounded once
        else:
            total += self._down(gated)
        return total[None]

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Write the keys and values of all rows to their slots, and attend. x [tokens, width] -> [tokens, heads *
        dim]."""
        step, index = current_step(), self.index
        if step.inputs is not None:
            step.inputs(index, x)
        rows = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        pages = step.pages(index)
        place = rows, cos[0], sin[0], self._head_norms, step.meta.slots, pages.k, pages.v
        queries, plain_keys = self._kernels.place(*place)
        step.layers_called.append(index)
        step.layers_rotated.append(index)
        step.params[index] = self._params
        if step.sink is not None:
            step.sink.write(index, plain_keys, rows[:, -pages.v.shape[2] :])
        if step.arrive is not None:
            step.arrive(index)
        params = in_part(step, index, queries, pages, self._params)
        return step.backend.forward(queries, pages, step.meta, params).flatten(1)


def _weight_and_eps(norm: Any) -> tuple[Tensor, float]:
    return norm.weight, norm.variance_epsilon


def joined(layers: Sequence[Any]) -> nn.Module:
    """Return one linear layer that computes the outputs of all `layers`, which have the same input, side by side."""
    if len(layers) == 1:
        only: nn.Module = layers[0]
        return only
    if isinstance(layers[0], CudaQuantisedLinear):
        return join_packed(layers)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return linear(torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a linear layer with this weight and bias, which are not copied."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made
