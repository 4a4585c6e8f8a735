"""The KV pool of a model: what it takes, and its memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reprise.engine.model.probe import KvShape
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.int8_rows import SCALE_BYTES, pack_rows, packed_width


def make_pages(
    shapes: Sequence[KvShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[KvPages]:
    """Allocate the KV pool: for each layer K and V [pages, page_size, kv_heads, dim]; dtype int8: rows as in
    `reprise.kernels.int8_rows`. On CPU, memory becomes resident when it is first written. Raises torch's out-of-memory
    error on CUDA."""

    def pool(heads: int, dim: int) -> Tensor:
        dim = _width(dim, dtype)
        if device.type != "cpu":
            return torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
        # Heads are outermost in memory: attention then reads one head's rows as one stream where pages are adjacent.
        memory = torch.empty(heads, num_pages, page_size, dim, dtype=dtype)
        return memory.permute(1, 2, 0, 3)

    return [KvPages(k=pool(s.kv_heads, s.k_dim), v=pool(s.kv_heads, s.v_dim)) for s in shapes]


def blank_pages(
    shapes: Sequence[KvShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | None = None
) -> list[KvPages]:
    """Make pages of zeros, on CPU if nothing is said, laid out as the engine's: kernels are compiled for a kind of
    strides."""
    made = make_pages(shapes, num_pages, page_size, dtype, device or torch.device("cpu"))
    for pages in made:
        pages.k.zero_()
        pages.v.zero_()
    return made


def spoil(pages: KvPages, numbers: Sequence[int]) -> None:
    """Make every number in some pages NaN, so that any read of an unwritten row shows."""
    for pool in (pages.k, pages.v):
        nothing = torch.full((pool.shape[3],), torch.nan)
        pool[numbers] = pack_rows(nothing[:-SCALE_BYTES]) if pages.is_packed else nothing.to(pool)


def bytes_per_token(shapes: Sequence[KvShape], dtype: torch.dtype) -> int:
    """Return the KV bytes of one token over all layers, in pages of this dtype; of int8, scales and all."""
    return sum(s.kv_heads * (_width(s.k_dim, dtype) + _width(s.v_dim, dtype)) for s in shapes) * dtype.itemsize


def _width(dim: int, dtype: torch.dtype) -> int:
    """Return the elements of one head of a row."""
    return packed_width(dim) if dtype == torch.int8 else dim
