"""Computes layers of experts whose weights stay packed, by transformers' interface for functions of experts.

A module of experts keeps its own code for gates and its biases; only its weights, [experts, outputs, inputs], are
packed: all experts of a projection in one `PackedWeight`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from reprise.engine.model.cpu.quantised import few_product, product_in_float32
from reprise.engine.model.known_parts import agree
from reprise.kernels.cpu.available import dots_of_pairs, expert_kernels
from reprise.kernels.packed import BLOCK, PackedWeight, expert_of, table_of, unpack
from reprise.kernels.views import as_bits

NAME = "reprise_packed"
"""The name of `packed_experts` among transformers' functions of experts."""
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
"""The names of the weights of experts: of those with a gate the first and the last, of others the last two."""
_CHECK_ROWS = 40  # each of three experts gets more rows than are unpacked in registers


class QuantisedProjection(nn.Module):
    """The packed weights of one projection (such as gate and up, or down) of all experts of a layer. It takes the place
    of a parameter [experts, outputs, inputs]."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.packed = weight
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.register_buffer("table", table_of(weight))
        can_run = weight.codes.device.type == "cpu" and expert_kernels() is not None
        self.few = few_product(_one_matrix(weight), None) if can_run else None
        self.fields = None if self.few is None else np.array(self.few.fields, np.int64)
        self._in_float32 = None if self.few is None else product_in_float32(self.few)

    def multiply_pairs(self, x: Tensor, rows: np.ndarray, to: Any) -> Tensor:
        """Multiply rows by the matrices of their experts with the compiled kernels: [pairs, outputs]. A pair is a row
        and one expert that the router chose for it. x bf16 or fp32 [n, inputs]. rows int64 [pairs]: the row of x of
        each pair. to: the kernels' assignment of pairs to experts. Raises ValueError for rows of another width, because
        kernels read by address."""
        _check_width(x, self)
        assert self._in_float32 is not None
        kernels: Any = expert_kernels()
        out = x.new_empty(len(rows), self.packed.outputs)
        if x.dtype == torch.float32:
            fields = np.array(self._in_float32.fields, np.int64)
            kernels.multiply_in_float32(x.contiguous().numpy(), rows, to, fields, self.packed.experts, out.numpy())
        else:
            assert x.dtype == torch.bfloat16
            dots = (0,) if dots_of_pairs() else ()
            kernels.multiply(as_bits(x.contiguous()), rows, to, self.fields, self.packed.experts, dots, as_bits(out))
        return out

    def multiply(self, x: Tensor, expert: int) -> Tensor:
        """Return x [rows, inputs] times the matrix of one expert, computed by torch: [rows, outputs]."""
        return F.linear(x, unpack(expert_of(self.packed, expert), x.dtype))

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that decide which kernels are used."""
        weight = self.packed
        return weight.bits, weight.group, weight.lows is not None, weight.table, *weight.shape

    def use_no_kernels(self) -> None:
        self.fields = self.few = self._in_float32 = None


def _one_matrix(weight: PackedWeight) -> PackedWeight:
    """Return all experts as one matrix, with the outputs that complete their blocks."""
    return replace(weight, outputs=len(weight.scales) * BLOCK, experts=0)


def compute_packed(experts: Any, leaf: str, weight: QuantisedProjection) -> None:
    """Replace a parameter of transformers' module of experts by a packed weight, and have the module computed by
    `packed_experts`. leaf: the parameter's name in the module."""
    delattr(experts, leaf)
    setattr(experts, leaf, weight)
    experts.config._experts_implementation = NAME


def projections_of(module: nn.Module) -> list[QuantisedProjection]:
    """Return the packed projections of a module of experts, the down projection last; an empty list for other
    modules."""
    found = [getattr(module, name, None) for name in PROJECTIONS]
    return [each for each in found if isinstance(each, QuantisedProjection)]


def packed_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a layer of experts. self: transformers' module of experts, whose weights are `QuantisedProjection`s.
    hidden_states [rows, inputs]; top_k_index int64, top_k_weights [rows, experts a row] -> [rows, outputs]. Raises
    ValueError for inputs of another width than the weights'."""
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if not isinstance(up, QuantisedProjection):  # experts of another layer are packed, these are not
        plain: Tensor = moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return plain
    if up.packed.experts != down.packed.experts:
        raise ValueError(f"experts are {up.packed.experts} in one projection, {down.packed.experts} in the other")
    has_kernels = up.fields is not None and down.fields is not None
    if not has_kernels or hidden_states.dtype not in (torch.bfloat16, torch.float32):
        return _by_torch(self, up, hidden_states, top_k_index, top_k_weights)
    # Kernels read by address: sizes are those of the weights, not those that the module claims.
    num_experts = up.packed.experts
    kernels: Any = expert_kernels()
    chosen, weights = top_k_index.contiguous().numpy(), top_k_weights.float().contiguous()
    if hidden_states.dtype == torch.bfloat16 and _is_plain(self):
        _check_width(hidden_states, up)
        x, out = hidden_states.contiguous(), hidden_states.new_empty(len(hidden_states), down.packed.outputs)
        numbers, dots = weights.numpy(), (0,) if dots_of_pairs() else ()
        kernels.gated_experts(as_bits(x), chosen, numbers, num_experts, up.fields, down.fields, dots, as_bits(out))
        return out
    to = kernels.assign(chosen, num_experts)
    pairs = torch.from_numpy(to.pairs)
    experts = top_k_index.reshape(-1)[pairs]
    made = _activated(self, up.multiply_pairs(hidden_states, to.pairs // chosen.shape[1], to), experts)
    parts = _finished(self, down.multiply_pairs(made, np.arange(len(pairs)), to), experts)
    # In the order of the rows' own choice, so that a row's sum does not depend on other rows.
    ordered = parts.new_zeros(top_k_index.numel(), parts.shape[1], dtype=torch.float32)
    ordered[pairs] = parts.float() * weights.view(-1)[pairs, None]
    return ordered.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _check_width(x: Tensor, weight: QuantisedProjection) -> None:
    if x.shape[1] != weight.packed.inputs:
        raise ValueError(f"experts have {weight.packed.inputs} inputs and were given {x.shape[1]}")


def _is_plain(experts: Any) -> bool:
    """Return whether a module computes down(silu(gate(x)) * up(x)) and nothing else, in whole blocks."""
    return (
        experts.has_gate
        and experts.is_concatenated
        and not experts.has_bias
        and not experts.has_post_expert_norm
        and type(experts)._apply_gate is moe._default_apply_gate
        and isinstance(experts.act_fn, SiLUActivation | nn.SiLU)
        and experts.gate_up_proj.packed.outputs % (2 * BLOCK) == 0
        and experts.down_proj.packed.inputs * 2 == experts.gate_up_proj.packed.outputs
    )


def _activated(experts: Any, made: Tensor, which: Tensor) -> Tensor:
    """Return what stands between the projections. made: results of the first [pairs, outputs]; which: the expert of
    each pair."""
    if experts.has_bias:
        made = made + (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias)[which].to(made.dtype)
    out: Tensor = experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)
    return out


def _finished(experts: Any, parts: Tensor, which: Tensor) -> Tensor:
    if experts.has_bias:
        parts = parts + experts.down_proj_bias[which].to(parts.dtype)
    return experts.post_expert_norm(parts) if experts.has_post_expert_norm else parts


def _by_torch(experts: Any, up: QuantisedProjection, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the same with torch, one expert after the other, each unpacked while it is used."""
    ordered = x.new_zeros(index.numel(), experts.down_proj.packed.outputs, dtype=torch.float32)
    flat, each = index.reshape(-1), index.shape[1]
    for expert in flat.unique().tolist():
        if not 0 <= expert < up.packed.experts:
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        which = flat[pairs]
        made = _activated(experts, up.multiply(x[pairs // each], expert), which)
        parts = _finished(experts, experts.down_proj.multiply(made, expert), which)
        ordered[pairs] = parts.float() * weights.reshape(-1)[pairs, None].float()
    return ordered.view(*index.shape, -1).sum(1).to(x.dtype)


def is_right(experts: Any) -> bool:
    """Return whether the compiled kernels agree with the unpacked weights of the first, a middle and the last expert of
    a module. Comparing all experts would take torch a minute."""
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    some = torch.tensor(sorted({0, up.packed.experts // 2, up.packed.experts - 1}))
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(_CHECK_ROWS, up.packed.inputs, generator=generator).bfloat16()
    index = torch.stack([some[torch.randperm(len(some), generator=generator)[:2]] for _ in narrow])
    weights = torch.rand(index.shape, generator=generator)
    for x in (narrow, narrow.float()):
        wanted = _by_torch(experts, up, x, index, weights)
        for rows in (1, _CHECK_ROWS):
            if not agree(packed_experts(experts, x[:rows], index[:rows], weights[:rows]), wanted[:rows]):
                return False
    return True


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, packed_experts)
