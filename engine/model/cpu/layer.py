"""Computes a whole decoder layer in bf16 on CPU, of the kind used by Llama, Mistral, Qwen2, Qwen3 and others.

The model's own code makes some sixty torch calls; this makes about twenty, with queries and keys rotated together, and
residual sums and the gate computed inside the matrix products. A few rows, as a decode step of some streams has them,
take two calls of compiled kernels. `optimise` replaces layers by it if it gives the same results.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reprise.engine.model.cpu.few_rows import FewRows, LayerParts
from reprise.engine.model.cpu.many_rows import NOWHERE, rotate_and_write
from reprise.engine.model.cpu.modules import ExactGate, ExactLinear, Gate, PackedLinear, RmsNorm, SummedLinear
from reprise.engine.model.cpu.quantised import QuantisedGate, QuantisedLinear, QuantisedTogether
from reprise.engine.model.hf_model import Step, attend, current_step, in_part, turn_halves
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, Selection


class DecoderLayer(nn.Module):
    """A decoder layer: hidden [1, tokens, width] -> the same shape, inside a step. Takes the arguments of a
    transformers layer and uses, besides the hidden states, only the rotary tables; pages and positions come from the
    current step."""

    def __init__(self, layer: nn.Module, index: int, params: AttentionParams, exact: bool) -> None:
        """Take over the weights of `layer`. index: its number in the model. exact: whether a row's result must not
        depend on the number of rows in the batch, whatever that costs in speed."""
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        head_dim: int = attention.head_dim
        self.index, self._params, self._head_dim = index, params, head_dim
        self._heads = [linear.out_features // head_dim for linear in inputs]
        self._input_norm = _norm(layer.input_layernorm)
        self._qkv: Any = _together(inputs, exact)
        self._q_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._rotate = rotate_and_write(self._heads[0], self._heads[1], head_dim)
        self._post_norm = _norm(layer.post_attention_layernorm)
        self._gate: Any = _gate(mlp.gate_proj, mlp.up_proj, exact)
        self._out, self._down = (_summed(linear, exact) for linear in (attention.o_proj, mlp.down_proj))
        self.few: FewRows | None = None if exact else self._few_rows()
        self._is_exact = exact
        self.is_last = False  # if True, only rows whose logits are wanted are finished

    @property
    def saves_rows(self) -> bool:
        """Whether the layer has kernels that also write rows to DRAM (`Step.saved`)."""
        return self._rotate is not None and (self.few is not None or self._is_exact)

    def _few_rows(self) -> FewRows | None:
        gate, up = self._gate.few
        qkv = self._qkv.few if isinstance(self._qkv, QuantisedTogether) else (self._qkv.few, None, None)
        products = (*(qkv or (None,) * 3), self._out.few, gate, up, self._down.few)
        if any(products[place] is None for place in (0, 3, 4, 5, 6)) or gate.block != up.block:
            return None
        if self._params.softcap is not None or self._params.sinks is not None:
            return None
        num_q, num_k, num_v = self._heads
        norms = (self._input_norm, self._q_norm, self._k_norm, self._post_norm)
        return FewRows(self.index, LayerParts(self._params, (num_q, num_k, num_v), self._head_dim, products, norms))

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        hidden = hidden_states[0]
        if self.index < current_step().computed_layers:
            return hidden_states
        if self.few is not None and self.few.takes(hidden, *position_embeddings):
            return self.few(hidden, *position_embeddings)[None]
        wanted = current_step().logit_rows if self.is_last else None
        if wanted is not None and len(wanted) == len(hidden):
            wanted = None
        mixed = self._attend(self._input_norm(hidden), *position_embeddings, wanted)
        if wanted is None:
            return self._finish(mixed, hidden)[None]
        out = torch.full_like(hidden, float("nan"))  # shows if an unwanted row is read
        if len(wanted):
            out[wanted] = self._finish(mixed, hidden[wanted])
        return out[None]

    def _finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        hidden = self._out(mixed, hidden)
        out: Tensor = self._down(self._gate(self._post_norm(hidden)), hidden)
        return out

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None) -> Tensor:
        """Write the keys and values of all rows to their slots. Returns the attention [rows, width] of all rows, or
        only for the wanted ones."""
        step = current_step()
        tokens = x.shape[0]
        num_q, num_k, _ = self._heads
        if step.inputs is not None:
            step.inputs(self.index, x)
        rows = self._qkv(x).view(tokens, -1, self._head_dim)
        turning, values = rows[:, : num_q + num_k], rows[:, num_q + num_k :]
        if self._q_norm is not None and self._k_norm is not None:
            turning = torch.cat((self._q_norm(turning[:, :num_q]), self._k_norm(turning[:, num_q:])), dim=1)
        pages = step.pages(self.index)
        rotate = self._rotate if self._rotate is not None and self._rotate.takes(turning, cos, sin, pages) else None
        saved = NOWHERE
        if rotate is not None and step.saved is not None:
            saved = step.saved.blocks[self.index], step.saved.spots
        elif step.sink is not None:
            step.sink.write(self.index, turning[:, num_q:], values)
        step.layers_called.append(self.index)
        step.layers_rotated.append(self.index)
        if rotate is not None:
            queries = rotate(turning, values, cos[0], sin[0], step.meta.slots, pages, *saved)
            step.params[self.index] = self._params
            if step.arrive is not None:
                step.arrive(self.index)
            meta, params = step.meta, in_part(step, self.index, queries, pages, self._params)
            if wanted is not None:
                params = _of_wanted(params, step, wanted)
                queries, meta = queries[wanted], single_rows(meta, wanted)
            return step.backend.forward(queries, pages, meta, params).flatten(1)
        turned = turn_halves(turning, cos[0][:, None], sin[0][:, None])
        out = attend(step, self.index, turned[:, :num_q], turned[:, num_q:], values, self._params).flatten(1)
        return out if wanted is None else out[wanted]


def single_rows(meta: AttentionMeta, rows: Tensor) -> AttentionMeta:
    """Describe rows of a step as a batch of their own, in which each is a sequence with one query row. rows [n] int64:
    indices into the step's batch."""
    sequence = torch.searchsorted(meta.query_start, rows, right=True) - 1
    behind = meta.query_start[sequence + 1] - 1 - rows  # number of later rows of the same sequence
    context_len = (meta.context_len[sequence] - behind).to(torch.int32)
    return AttentionMeta(
        query_lens=[1] * len(rows),
        context_lens=context_len.tolist(),
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        context_len=context_len,
        block_table=meta.block_table[sequence],
        slots=meta.slots[rows],
    )


def _of_wanted(params: AttentionParams, step: Step, wanted: Tensor) -> AttentionParams:
    """Return the attention parameters for a layer that computes only the wanted rows: the selection of context rows to
    read keeps only the entries of sequences whose row is wanted. wanted: the rows' numbers in the batch, ascending."""
    if params.selection is None or step.selection is None:
        return params
    tokens = step.selection.candidates.tokens
    place = torch.searchsorted(wanted, tokens).clamp_max(len(wanted) - 1)
    kept = (wanted[place] == tokens).nonzero()[:, 0]
    if not len(kept):
        return replace(params, selection=None)
    chosen = params.selection
    selection = Selection(tuple(place[kept].tolist()), chosen.rows[kept], chosen.counts[kept])
    return replace(params, selection=selection)


def _together(layers: list[Any], exact: bool) -> Any:
    """Return one linear layer whose output is the concatenation of the outputs of several layers with the same
    input."""
    if isinstance(layers[0], QuantisedLinear):
        return QuantisedTogether(layers)
    biases = [linear.bias for linear in layers if linear.bias is not None]
    weight = torch.cat([linear.weight.data for linear in layers])
    return (ExactLinear if exact else PackedLinear)(weight, torch.cat(biases) if biases else None)


def _gate(gate: Any, up: Any, exact: bool) -> Any:
    if isinstance(gate, QuantisedLinear):
        return QuantisedGate(gate, up)
    return (ExactGate if exact else Gate)(gate, up)


def _summed(linear: Any, exact: bool) -> Any:
    """Return a linear layer that also adds a residual."""
    if isinstance(linear, QuantisedLinear):
        return linear
    return ExactLinear(linear.weight, linear.bias) if exact else SummedLinear(linear)


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)
