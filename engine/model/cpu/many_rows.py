"""Rotates many rows and writes their keys and values to the pool in one compiled pass."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprise.engine.model.hf_model import turn_halves
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.cpu.available import prefill_kernels
from reprise.kernels.kv_copy import write_rows
from reprise.kernels.views import as_bf16, as_bits, as_stream

_CHECK_ROWS = 5
NOWHERE = (np.empty((0, 0), np.uint16), np.empty((0, 2), np.int64))  # blocks and spots if nothing is saved


class RotateAndWrite:
    """A compiled pass that gives the same bits as `turn_halves` and then `write_rows`. heads: the number of query heads
    and of key heads."""

    def __init__(self, kernels: Any, heads: tuple[int, int], head_dim: int) -> None:
        self._kernels, self._heads, self._head_dim = kernels, heads, head_dim
        self._pool: tuple[KvPages, tuple[Any, ...]] | None = None

    def takes(self, turning: Tensor, cos: Tensor, sin: Tensor, pages: KvPages) -> bool:
        """Return whether this implementation gives the right result for these rows."""
        pools = pages.k, pages.v
        return (
            cos.shape[-1] == self._head_dim
            and all(x.dtype == torch.bfloat16 for x in (turning, cos, sin))
            and pages.has_kernels
            and all(x.device.type == "cpu" and x.stride(-1) == 1 for x in (turning, cos, sin, *pools))
        )

    def __call__(
        self,
        turning: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        pages: KvPages,
        blocks: np.ndarray,
        spots: np.ndarray,
    ) -> Tensor:
        """Rotate rows and write them to the pool. Returns the rotated queries [rows, q heads, head_dim]; the inputs are
        not changed. turning [rows, q and k heads, head_dim] and values [rows, k heads, head_dim], in both the heads of
        a row adjacent in memory; cos, sin [rows, head_dim]; slots [rows] int64, all different and inside the pool.
        blocks, spots: the DRAM slots, and each row's place in them, to which un-rotated rows are saved
        (`SavedRows`)."""
        queries = turning.new_empty(len(turning), self._heads[0], self._head_dim)
        if len(turning):
            self._kernels.place(
                *(as_stream(turning), turning.stride(0), as_stream(values), values.stride(0)),
                *(as_bits(cos.contiguous()), as_bits(sin.contiguous()), slots.numpy(), blocks, spots, self._heads),
                *(*self._memory(pages), as_bits(queries)),
            )
        return queries

    def _memory(self, pages: KvPages) -> tuple[Any, ...]:
        """Return the layer's pool as the kernels' arguments: K, its strides, V, its strides, page size, whether rows
        are packed. They are made once, because an engine uses the same pool in every step."""
        if self._pool is None or self._pool[0] is not pages:
            k, v = as_bf16(pages.k), as_bf16(pages.v)
            streams = (as_stream(k), k.stride()[:3], as_stream(v), v.stride()[:3])
            self._pool = (pages, (*streams, k.shape[1], pages.is_packed))
        return self._pool[1]


def rotate_and_write(num_q: int, num_k: int, head_dim: int) -> RotateAndWrite | None:
    """Return the compiled rotation, or None if it cannot run here or differs from torch."""
    kernels = prefill_kernels()
    if kernels is None or head_dim % 2:
        return None
    ours = RotateAndWrite(kernels, (num_q, num_k), head_dim)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    rows, turns = random(_CHECK_ROWS, num_q + 2 * num_k, head_dim), random(2, _CHECK_ROWS, head_dim)
    turning, values = rows[:, : num_q + num_k], rows[:, num_q + num_k :]
    slots = torch.randperm(2 * _CHECK_ROWS, generator=generator)[:_CHECK_ROWS]
    # Heads outermost, as in the engine.
    pools = torch.zeros(4, num_k, 2, _CHECK_ROWS, head_dim, dtype=torch.bfloat16).transpose(1, 2).transpose(2, 3)
    got, want = KvPages(pools[0], pools[1]), KvPages(pools[2], pools[3])
    queries = ours(turning, values, turns[0], turns[1], slots, got, *NOWHERE)
    turned = turn_halves(turning, turns[0][:, None], turns[1][:, None])
    write_rows(want.k, slots, turned[:, num_q:])
    write_rows(want.v, slots, values)
    same = torch.equal(queries, turned[:, :num_q]) and torch.equal(pools[:2], pools[2:])
    return RotateAndWrite(kernels, (num_q, num_k), head_dim) if same else None
