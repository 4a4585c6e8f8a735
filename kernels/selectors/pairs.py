"""Chooses rows by partial keys of RoPE pairs: InfiniGen (arXiv 2406.19707) for models with rotary positions and grouped
queries.

InfiniGen scores all rows by a few dims of a skewed query and key, and attends to the strongest rows alone. The skew, an
orthogonal product folded into the weights, does not commute with rotations. So here the few dims are whole pairs that
RoPE turns together: those in which queries and keys are strong, found by calibration. Scores use the query itself, not
a guess made one layer ahead, because there is no slow link whose time a guess would hide.

Each kv head chooses for itself. A row counts by the query head of the group that gives it the most weight, relative to
that head's strongest row. Comparing with the sum instead takes an exponential of every score and is no better. Measured
on SmolLM2-135M with 64 tokens after 4,096 of each of two books, 12.5 % read in all layers but the first: 8 pairs of 32
cost 0.0064 nats, 10 cost 0.0051, 16 cost 0.0039; exact scores, 0.0033; one choice for all kv heads by 10 pairs, 0.0064.
After 7,680, in all layers: 8 pairs cost 0.0124 reading 5 %, 0.0040 reading 10 %, 0.0027 reading 12.5 %.
"""

import numpy as np
import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages, Selection
from reprise.kernels.attention.selection import (
    Candidates,
    LayerMoments,
    SelectorInputs,
    as_selection,
    context_keys,
    most_rows,
    strongest,
    weights,
)
from reprise.kernels.attention.torch_cpu import fits_kernels
from reprise.kernels.cpu.available import select_kernels
from reprise.kernels.views import as_bits

PAIRS = 8  # pairs of a kv head
_MOST_KNOWN = 1024  # sequences whose rows are known to be in the index; others are indexed anew
_ROOM = 16  # numbers that the kernel may write after the last chosen row


class PairSelector:
    """A selector that chooses context rows by partial keys: a few pairs of each key's dims. With compiled kernels an
    index beside the KV pool holds the partial keys; without, they are gathered from the pool. Called by the engine's
    thread."""

    name = "pairs"
    looks_ahead = False

    def __init__(self, inputs: SelectorInputs) -> None:
        self._share, self._pool = inputs.share, (inputs.num_pages, inputs.page_size)
        self._dims = [strongest_pairs(layer) for layer in inputs.moments]  # [kv_heads, PAIRS, 2] int64
        self._words: list[np.ndarray | None] = [None] * len(self._dims)
        self._indexed: list[dict[int, int]] = [{} for _ in self._dims]  # layer -> owner -> rows in the index
        self._kernels = select_kernels()
        self.index_bytes_per_token = (
            0 if self._kernels is None else sum(4 * d.shape[0] * d.shape[1] for d in self._dims)
        )

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """Choose rows for one layer, as `KvSelector.choose` demands."""
        if self._kernels is not None and fits_kernels(queries.shape[1], kv) and self._pool[1] % 32 == 0:
            return self._chosen_by_kernel(layer, queries, kv, candidates)
        rows = {
            at: strongest(
                pair_weights(queries[at], context_keys(kv, candidates.table[at], context), self._dims[layer]),
                most_rows(context, self._share),
            )
            for at, context in enumerate(candidates.contexts)
        }
        return as_selection(candidates, rows)

    def _chosen_by_kernel(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection:
        dims = self._dims[layer]
        kv_heads, pairs, _ = dims.shape
        words = self._words[layer]
        if words is None:
            num_pages, page_size = self._pool
            # Resident when it is first written, as the pool is.
            words = np.zeros((kv_heads, num_pages, page_size // 32, pairs, 32), np.uint32)
            self._words[layer] = words
        most = np.array([most_rows(context, self._share) for context in candidates.contexts])
        rows = torch.empty(len(most), kv_heads, int(most.max()) + _ROOM, dtype=torch.int32)
        counts = torch.empty(len(most), kv_heads, dtype=torch.int64)
        spans = self._spans(layer, candidates)
        sizes = (0,) * (queries.shape[1] // kv_heads), (0,) * pairs
        found = rows.numpy(), counts.numpy()
        pool, table = as_bits(kv.k), candidates.table.numpy()
        assert self._kernels is not None
        self._kernels.choose(queries.numpy(), pool, table, spans, dims.numpy(), words, most, *sizes, *found)
        return Selection(candidates.sequences, rows, counts)

    def _spans(self, layer: int, candidates: Candidates) -> np.ndarray:
        """Return int64 [candidates, 2]: the first row that is not in the layer's index, and the length of the context.
        Marks these rows as indexed, so the caller has to put them into the index."""
        indexed, spans = self._indexed[layer], np.empty((len(candidates.contexts), 2), np.int64)
        for at, (owner, context) in enumerate(zip(candidates.owners, candidates.contexts, strict=True)):
            known = indexed.pop(owner, 0)
            spans[at] = known if known < context else 0, context  # a context that did not grow may be another
            indexed[owner] = context
        while len(indexed) > _MOST_KNOWN:
            del indexed[next(iter(indexed))]
        return spans


def pair_weights(queries: Tensor, keys: Tensor, dims: Tensor) -> Tensor:
    """Return the `weights` of context rows (log2 of softmax weights) by scores over some pairs of dims only, [kv_heads,
    rows]. queries fp32 [heads, k_dim], scaled to the base of 2; keys [rows, kv_heads, k_dim]; dims [kv_heads, pairs,
    2]."""
    kv_heads = keys.shape[1]
    group = queries.view(kv_heads, -1, queries.shape[1])
    scores = [group[head][:, at] @ keys[:, head, at].float().T for head, at in enumerate(dims.flatten(1))]
    return weights(torch.stack(scores))


def strongest_pairs(layer: LayerMoments) -> Tensor:
    """Return the pairs of dims in which each kv head's queries and keys are strongest [kv_heads, PAIRS, 2] int64."""
    queries, keys = (moments.diagonal(dim1=1, dim2=2)[:, layer.pairs].sum(2) for moments in (layer.queries, layer.keys))
    best = (queries * keys).topk(min(PAIRS, len(layer.pairs)), dim=1).indices
    return layer.pairs[best.sort(1).values]
