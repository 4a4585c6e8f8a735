"""Measures in which dims a model's queries and keys are strong, for selectors of KV."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.probe import RopeSource
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from reprise.kernels.attention.selection import LayerMoments
from reprise.kernels.kv_copy import gather_rows

_CHUNK_TOKENS = 256  # tokens that are computed together, with all of their logits
_MOST_TOKENS = 2048  # tokens with which the figures in kernels/selectors/pairs.py were measured


class _Watching:
    """An attention backend that also sums the outer products of the rotated queries and keys of every layer. The thread
    that measures calls it for the layers in order."""

    def __init__(self, backend: AttentionBackend, num_layers: int) -> None:
        self.name, self.page_multiple = backend.name, backend.page_multiple
        self._backend, self._calls = backend, 0
        self.queries: list[Tensor | float] = [0.0] * num_layers  # [kv_heads, k_dim, k_dim]
        self.keys: list[Tensor | float] = [0.0] * num_layers

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Sum the products of a layer's queries and keys, and attend as the inner backend does."""
        layer = self._calls % len(self.queries)
        self._calls += 1
        keys = kv.to_numbers(gather_rows(kv.k, meta.slots)).float().transpose(0, 1)  # [kv_heads, tokens, k_dim]
        grouped = q.float().unflatten(1, (len(keys), -1)).permute(1, 0, 2, 3).flatten(1, 2)
        self.queries[layer] = self.queries[layer] + grouped.transpose(1, 2) @ grouped
        self.keys[layer] = self.keys[layer] + keys.transpose(1, 2) @ keys
        return self._backend.forward(q, kv, meta, params)


def measure_moments(
    runner: ModelRunner,
    texts: Sequence[Tensor],
    ropes: Sequence[RopeSource | None],
    *,
    page_size: int,
    most_rows: int,
    device: torch.device,
) -> list[LayerMoments]:
    """Run a model over texts [tokens] and return the moments of each layer's queries and keys (means of the products of
    their dims with each other). Overwrites pages from 0 on, which must not be in use. most_rows: how many rows the
    usable pages hold together; longer texts are shortened to it."""
    watching = _Watching(runner.backend, len(ropes))
    plain, runner.backend = runner.backend, watching
    try:
        left = _MOST_TOKENS
        for number, text in enumerate(texts):
            ids = text[: min(left, most_rows)].tolist()
            left -= len(ids)
            tables = BlockTables(max_seqs=1, max_pages=-(-max(1, len(ids)) // page_size))
            pages = list(range(-(-len(ids) // page_size)))
            for first in range(0, len(ids), _CHUNK_TOKENS):
                chunk = ids[first : first + _CHUNK_TOKENS]
                item = BatchItem(f"text {number}", chunk, first, pages, True, prompt_rows=len(chunk) - 1)
                runner.forward(build_batch([item], tables, page_size, device), None)
    finally:
        runner.backend = plain
    return [
        LayerMoments(_tensor(queries), _tensor(keys), rotated_pairs(rope, _tensor(keys).shape[1]))
        for queries, keys, rope in zip(watching.queries, watching.keys, ropes, strict=True)
    ]


def rotated_pairs(rope: RopeSource | None, k_dim: int) -> Tensor:
    """Return the dims that a layer's rotation turns together [pairs, 2] int64; adjacent ones if the rotation is not
    known or turns nothing."""
    width = rope.call.num_turned if rope is not None and rope.call.is_by_halves else 0
    turned = torch.arange(width // 2)
    halves = torch.stack([turned, turned + width // 2], 1)
    return torch.cat([halves, torch.arange(width, k_dim - k_dim % 2).view(-1, 2)])


def _tensor(total: Tensor | float) -> Tensor:
    assert isinstance(total, Tensor)  # every layer was called
    return total.cpu()
