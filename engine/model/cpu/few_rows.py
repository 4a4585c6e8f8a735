"""A decoder layer for a few rows by compiled kernels, as needed by a decode step of up to four streams."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.cpu.many_rows import NOWHERE
from engine.model.cpu.modules import FEW_ROWS, RmsNorm
from engine.model.hf_model import Step, current_step
from kernels.attention.ragged_batch import AttentionParams, KvPages
from kernels.attention.torch_cpu import TorchAttention, fits_kernels
from kernels.cpu.available import decode_kernels, split_contexts, use_torch_threads
from kernels.views import as_bits


class FewRows:
    """Computes hidden [rows, width] -> the same shape, inside a step. Uses five parallel loops instead of some twenty
    torch calls. Sums that the layer's own code rounds to bf16 stay in fp32."""

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
        self._group, self._lanes = (0,) * (heads[0] // heads[1]), (0,) * (head_dim // 16)
        self._scale = np.float32(params.scale)
        self._pool: tuple[KvPages, np.ndarray, np.ndarray] | None = None

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
            and self._params.softcap is None
            and self._params.sinks is None
            and cos.dtype == sin.dtype == hidden.dtype == torch.bfloat16
            and fits_kernels(self._heads[0], step.pages(self._index))
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
        places = (slots, *saved, self._scale, *self._memory(step.pages(self._index)))
        tasks = (table, parts, self._group, self._lanes)
        weights = (self._out, self._post_norm, self._gate, self._up, self._down)
        if step.arrive is not None:
            step.arrive(self._index)
        kernels.finish(bits, as_bits(rows), *turn, *places, *tasks, *weights, as_bits(out))
        return out

    def _memory(self, pages: KvPages) -> tuple[np.ndarray, np.ndarray]:
        """Return the layer's pool as arrays, made once, because an engine uses the same pool in every step."""
        if self._pool is None or self._pool[0] is not pages:
            self._pool = (pages, as_bits(pages.k), as_bits(pages.v))
        return self._pool[1:]

    def _plan(self, step: Step) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return each row's pages and slots and the attention tasks, computed once per step and window. A row before
        the last of its sequence is treated as having a context of its own, up to itself."""
        key, meta = f"few rows {self._params.window}", step.meta
        plan: tuple[np.ndarray, np.ndarray, Any] | None = meta.scratch.get(key)
        if plan is None:
            use_torch_threads()
            lens = list(zip(meta.query_lens, meta.context_lens, strict=True))
            contexts = [context - query + row + 1 for query, context in lens for row in range(query)]
            table = np.repeat(meta.block_table.numpy(), meta.query_lens, axis=0)
            parts = self._kernels.AttentionTasks(*split_contexts(contexts, self._params.window, self._kernels.PART))
            plan = meta.scratch[key] = (table, meta.slots.numpy(), parts)
        return plan
