"""A whole decoder layer in bf16 on CPU, of the kind used by Llama, Mistral, Qwen2, Qwen3 and others.

The model's own code makes some sixty torch calls; this makes about twenty, with queries and keys rotated together, and
residual sums and the gate computed inside the matrix products. A few rows, as a decode step of some streams has them,
take two calls of compiled kernels. `optimise` puts it in the place of layers that it gives the same result as.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.model.cpu.many_rows import NOWHERE, rotate_and_write
from engine.model.cpu.modules import FEW_ROWS, ExactGate, ExactLinear, Gate, PackedLinear, RmsNorm, SummedLinear
from engine.model.hf_model import Step, attend, current_step, in_part, turn_halves
from kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages, Selection
from kernels.attention.torch_cpu import TorchAttention, attend_selected, fits_kernels
from kernels.cpu.available import decode_kernels, select_kernels
from kernels.selectors.selector import StepSelection
from kernels.views import as_bits


class FewRows:
    """A layer's way for a few rows: hidden [rows, width] -> the same shape, inside a step. Uses five parallel loops
    instead of some twenty torch calls. Sums that the layer's own code rounds to bf16 stay in fp32."""

    def __init__(
        self,
        index: int,
        params: AttentionParams,
        heads: Sequence[int],
        head_dim: int,
        products: tuple[Any, ...],
        norms: tuple[RmsNorm | None, ...],
    ) -> None:
        self._kernels: Any = decode_kernels()
        self._index, self._params, self._heads, self._head_dim = index, params, tuple(heads), head_dim
        self._qkv, self._out, self._gate, self._up, self._down = products
        self._input_norm, self._q_norm, self._k_norm, self._post_norm = (self._norm(norm) for norm in norms)
        self._normed = norms[0]
        self._group, self._lanes = (0,) * (heads[0] // heads[1]), (0,) * (head_dim // 16)
        self._scale = np.float32(params.scale)
        self._pages: KvPages | None = None  # that `_pool` was made of
        self._pool: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def width(self) -> int:
        return int(self._qkv.inputs)

    def _norm(self, norm: RmsNorm | None) -> Any:
        if norm is None:
            return self._kernels.Norm(np.empty(0, np.float32), 0.0)
        return self._kernels.Norm(norm.weight.numpy(), norm.eps)

    def takes(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether this implementation is correct and faster for these rows."""
        step = current_step()
        return (
            0 < len(hidden) <= FEW_ROWS
            and type(step.backend) is TorchAttention
            and cos.dtype == sin.dtype == hidden.dtype == torch.bfloat16
            and self._memory(step.pages(self._index)) is not None
            and (step.selection is None or select_kernels() is not None)
        )

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos, sin [1, rows, head_dim]."""
        step, kernels = current_step(), self._kernels
        table, slots, parts = self._plan(step)
        bits = as_bits(hidden.contiguous())
        rows = torch.empty(len(hidden), sum(self._heads), self._head_dim, dtype=hidden.dtype)
        num_q, num_k, _ = self._heads
        norms = (self._input_norm, self._q_norm, self._k_norm)
        kernels.project(bits, norms[0], self._qkv, norms[1], norms[2], num_q, num_k, as_bits(rows))
        if step.inputs is not None and self._normed is not None:
            step.inputs(self._index, self._normed(hidden))
        saved = NOWHERE
        if step.saved is not None:
            saved = step.saved.blocks[self._index], step.saved.spots
        elif step.sink is not None:
            _, keys, values = rows.split_with_sizes(self._heads, 1)  # takes half the time of two slices
            step.sink.write(self._index, keys, values)
        step.layers_called.append(self._index)
        step.layers_rotated.append(self._index)
        step.params[self._index] = self._params
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        turn = (as_bits(cos[0].contiguous()), as_bits(sin[0].contiguous()))
        pool = self._memory(step.pages(self._index))
        assert pool is not None  # else `takes` is False
        places = (slots, *saved, self._scale, *pool)
        tasks = (table, parts, self._group, self._lanes)
        weights = (self._out, self._post_norm, self._gate, self._up, self._down)
        if step.arrive is not None:
            step.arrive(self._index)
        if step.selection is None:
            kernels.finish(bits, as_bits(rows), *turn, *places, *tasks, *weights, as_bits(out))
        else:
            queries = kernels.turn(as_bits(rows), *turn, *places, self._group)
            mixed = self._read_in_part(step, step.selection, queries, table, parts)
            kernels.complete(bits, mixed, *weights, as_bits(out))
        return out

    def _read_in_part(
        self, step: Step, selection: StepSelection, queries: np.ndarray, table: np.ndarray, parts: Any
    ) -> np.ndarray:
        """Attend where some rows may read chosen parts of their contexts. queries: of `turn`; table, parts: of all
        rows, reading everything. Returns fp32 [rows, heads, head_dim]."""
        candidates, pages = selection.candidates, step.pages(self._index)
        pool, sizes = self._memory(pages), (self._group, self._lanes, self._lanes)
        assert pool is not None  # else `takes` is False
        tokens = candidates.tokens.numpy()
        chosen = selection.of_layer(self._index, torch.from_numpy(queries[tokens]), pages, self._params)
        mixed = np.empty_like(queries)
        if chosen is None:
            self._kernels.attend(queries, *pool, table, parts, *sizes, mixed)
            return mixed
        kernels = select_kernels()
        assert kernels is not None  # else `takes` is False
        few = attend_selected(kernels, queries[tokens], pages, candidates.table.numpy(), chosen).numpy()
        if len(few) == len(queries):
            return few
        rest = np.setdiff1d(np.arange(len(queries)), tokens)
        key, meta = f"few rows but those in part {self._params.window}", step.meta
        if key not in meta.scratch:
            contexts = _contexts(meta)
            meta.scratch[key] = self._kernels.plan([contexts[row] for row in rest], self._params.window)
        others = np.empty((len(rest), *queries.shape[1:]), np.float32)
        self._kernels.attend(queries[rest], *pool, table[rest], meta.scratch[key], *sizes, others)
        mixed[tokens], mixed[rest] = few, others
        return mixed

    def _memory(self, pages: KvPages) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the layer's pool as arrays, or None if the kernels cannot attend to it. Made once, because an engine
        uses the same pool in every step."""
        if self._pages is not pages:
            fits = fits_kernels(self._heads[0], pages)
            self._pages, self._pool = pages, (as_bits(pages.k), as_bits(pages.v)) if fits else None
        return self._pool

    def _plan(self, step: Step) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return each row's pages and slots and the attention tasks, computed once per step and window. A row before
        the last of its sequence is treated as having a context of its own, up to itself."""
        key, meta = f"few rows {self._params.window}", step.meta
        plan: tuple[np.ndarray, np.ndarray, Any] | None = meta.scratch.get(key)
        if plan is None:
            contexts = _contexts(meta)
            table = np.repeat(meta.block_table.numpy(), meta.query_lens, axis=0)
            parts = self._kernels.plan(contexts, self._params.window)
            plan = meta.scratch[key] = (table, meta.slots.numpy(), parts)
        return plan


def _contexts(meta: AttentionMeta) -> list[int]:
    """Return the length of each row's context, up to itself."""
    lens = zip(meta.query_lens, meta.context_lens, strict=True)
    return [context - query + row + 1 for query, context in lens for row in range(query)]


class DecoderLayer(nn.Module):
    """Computes hidden [1, tokens, width] -> the same shape, inside a step. Takes the arguments of a transformers layer;
    uses the rotary tables and the current step."""

    def __init__(self, layer: nn.Module, index: int, params: AttentionParams, exact: bool) -> None:
        """exact: rows must not depend on how many there are, at any cost in speed."""
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [linear.bias for linear in inputs if linear.bias is not None]
        head_dim: int = attention.head_dim
        self.index, self._params, self._head_dim = index, params, head_dim
        self._heads = [linear.out_features // head_dim for linear in inputs]
        self._input_norm = _norm(layer.input_layernorm)
        self._qkv: Any = (ExactLinear if exact else PackedLinear)(
            torch.cat([linear.weight.data for linear in inputs]), torch.cat(biases) if biases else None
        )
        self._q_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._rotate = rotate_and_write(self._heads[0], self._heads[1], head_dim)
        self._post_norm = _norm(layer.post_attention_layernorm)
        self._gate: Any = (ExactGate if exact else Gate)(mlp.gate_proj, mlp.up_proj)
        self._out, self._down = (_summed(linear, exact) for linear in (attention.o_proj, mlp.down_proj))
        self.few = None if exact else self._few_rows()
        self.is_last = False  # if True, only rows whose logits are wanted are finished

    @property
    def saves_rows(self) -> bool:
        """Whether it has kernels that write rows to where they are saved."""
        return self._rotate is not None and (self.few is not None or isinstance(self._qkv, ExactLinear))

    def _few_rows(self) -> FewRows | None:
        gate, up = self._gate.few
        products = (self._qkv.few, self._out.few, gate, up, self._down.few)
        if any(product is None for product in products) or gate.lanes != up.lanes:
            return None
        if self._params.softcap is not None or self._params.sinks is not None:
            return None
        norms = (self._input_norm, self._q_norm, self._k_norm, self._post_norm)
        return FewRows(self.index, self._params, self._heads, self._head_dim, products, norms)

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        hidden = hidden_states[0]
        if self.few is not None and self.few.takes(hidden, *position_embeddings):
            return self.few(hidden, *position_embeddings)[None]
        wanted = current_step().logit_rows if self.is_last else None
        if wanted is not None and len(wanted) == len(hidden):
            wanted = None
        mixed = self._attend(self._input_norm(hidden), *position_embeddings, wanted)
        if wanted is None:
            return self._finish(mixed, hidden)[None]
        out = torch.full_like(hidden, float("nan"))  # so that a read of an unwanted row shows
        if len(wanted):
            out[wanted] = self._finish(mixed, hidden[wanted])
        return out[None]

    def _finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        hidden = self._out(mixed, hidden)
        out: Tensor = self._down(self._gate(self._post_norm(hidden)), hidden)
        return out

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None) -> Tensor:
        """Write the keys and values of all rows to their slots; return [rows, width] for all rows or for the wanted
        ones."""
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
    """Describe some rows of a step [n] int64 as sequences with one query row each."""
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
    """Return parameters whose selection is of the sequences that `single_rows` makes."""
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


def _summed(linear: nn.Linear, exact: bool) -> Any:
    return ExactLinear(linear.weight, linear.bias) if exact else SummedLinear(linear)


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)
