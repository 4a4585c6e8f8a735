"""Bounds of blocks: Quest (arXiv 2406.10774). For comparison, in plain torch: it reads all keys to bound them.

Of every block of 32 rows the least and the greatest number of each dim bound the score that any of its keys can have;
the blocks of highest bounds are read whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages, Selection
from reprise.kernels.selectors.selector import (
    ALWAYS,
    Candidates,
    SelectorInputs,
    as_selection,
    context_keys,
    most_rows,
)

BLOCK = 32


class QuestSelector:
    """Chooses by kv head; a block counts as much as the query head of its group whose bound is highest."""

    name = "quest"
    index_bytes_per_token = 0
    looks_ahead = False

    def __init__(self, inputs: SelectorInputs) -> None:
        self._share = inputs.share

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """See KvSelector."""
        rows = {}
        for at, context in enumerate(candidates.contexts):
            bounds = block_bounds(queries[at], context_keys(kv, candidates.table[at], context))
            rows[at] = rows_of_blocks(bounds, context, most_rows(context, self._share))
        return as_selection(candidates, rows)


def block_bounds(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the highest score that a key of each block can have [kv_heads, blocks]. queries fp32 [heads, k_dim]; keys
    [rows, kv_heads, k_dim]."""
    rows, kv_heads, dim = keys.shape
    missing = -rows % BLOCK
    by_block = F.pad(keys.float().permute(1, 2, 0), (0, missing), mode="replicate").unflatten(2, (-1, BLOCK))
    high, low = by_block.amax(3), by_block.amin(3)  # [kv_heads, dim, blocks]
    group = queries.view(kv_heads, -1, dim)
    bounds: Tensor = group.clamp_min(0) @ high + group.clamp_max(0) @ low
    return bounds.amax(1)


def rows_of_blocks(bounds: Tensor, context: int, most: int) -> Tensor:
    """Return the rows of the first block, of the newest 32 rows, and of the blocks with the highest bounds, at most
    `most` [kv_heads, chosen] int32, ascending."""
    kv_heads = len(bounds)
    newest = (context - ALWAYS) // BLOCK  # the first block of those that hold the newest rows
    bounds = bounds.clone()
    bounds[:, 0] = bounds[:, newest:] = float("-inf")
    always = BLOCK + context - newest * BLOCK
    count = min(max(0, (most - always) // BLOCK), newest - 1)
    chosen = bounds.topk(count, dim=1).indices.sort(1).values
    middle = (chosen[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    ends = [torch.arange(a, b).expand(kv_heads, -1) for a, b in ((0, BLOCK), (newest * BLOCK, context))]
    return torch.cat([ends[0], middle, ends[1]], 1).int()
