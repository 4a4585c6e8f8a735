"""Makes the KV pool of a model and tells its size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reprise.engine.model.probe import KvShape
from reprise.kernels.attention.ragged_batch import KvPages, PageFormat


def make_pages(
    shapes: Sequence[KvShape], num_pages: int, page_size: int, page_format: PageFormat, device: torch.device
) -> list[KvPages]:
    """Allocate the KV pool: for each layer K and V as in `KvPages`. On CPU, memory becomes resident when it is first
    written. Raises torch's out-of-memory error on CUDA."""
    dtype, kind = page_format.dtype, page_format.kind

    def pool(heads: int, dim: int) -> Tensor:
        dim += kind.beside
        if device.type != "cpu":
            return torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
        # Heads are outermost in memory: attention then reads one head's rows as one stream where pages are adjacent.
        memory = torch.empty(heads, num_pages, page_size, dim, dtype=dtype)
        return memory.permute(1, 2, 0, 3)

    return [kind(k=pool(s.kv_heads, s.k_dim), v=pool(s.kv_heads, s.v_dim)) for s in shapes]


def blank_pages(
    shapes: Sequence[KvShape],
    num_pages: int,
    page_size: int,
    page_format: PageFormat,
    device: torch.device | None = None,
) -> list[KvPages]:
    """Allocate a KV pool of zeros, on CPU by default. Its strides are those of the engine's pool, for which kernels are
    compiled."""
    made = make_pages(shapes, num_pages, page_size, page_format, device or torch.device("cpu"))
    for pages in made:
        pages.k.zero_()
        pages.v.zero_()
    return made


def spoil(pages: KvPages, numbers: Sequence[int]) -> None:
    """Make every number in these pages NaN, so that a read of a row that was not written shows in the result."""
    for pool, dim in ((pages.k, pages.k_dim), (pages.v, pages.v_dim)):
        pool[numbers] = pages.to_rows(torch.full((dim,), torch.nan)).to(pool)


def bytes_per_token(shapes: Sequence[KvShape], page_format: PageFormat) -> int:
    """Return the bytes of KV that one token takes over all layers, in pages of this format."""
    beside = 2 * page_format.kind.beside
    return sum(s.kv_heads * (s.k_dim + s.v_dim + beside) for s in shapes) * page_format.dtype.itemsize
