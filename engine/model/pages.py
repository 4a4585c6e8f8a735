"""The KV pool of a model: what it takes, and its memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.probe import KvShape
from kernels.attention.ragged_batch import KvPages


def make_pages(
    shapes: Sequence[KvShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[KvPages]:
    """Allocate the KV pool: for each layer K and V [pages, page_size, kv_heads, dim]. On CPU, memory becomes resident
    when it is first written. Raises torch's out-of-memory error on CUDA."""

    def pool(heads: int, dim: int) -> Tensor:
        if device.type != "cpu":
            return torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
        # Heads are outermost in memory: attention then reads one head's rows as one stream where pages are adjacent.
        memory = torch.empty(heads, num_pages, page_size, dim, dtype=dtype)
        return memory.permute(1, 2, 0, 3)

    return [KvPages(k=pool(s.kv_heads, s.k_dim), v=pool(s.kv_heads, s.v_dim)) for s in shapes]


def bytes_per_token(shapes: Sequence[KvShape], dtype: torch.dtype) -> int:
    """Return the KV bytes of one token over all layers."""
    return sum(s.kv_heads * (s.k_dim + s.v_dim) for s in shapes) * dtype.itemsize
