"""Implements InfiniGen (arXiv 2406.19707) for models with rotary positions, as the paper has it, for comparison, in
plain torch.

Scores come from a guess: the query that a layer's weights make from the input of the layer before, so that rows can be
fetched while that layer computes. Query and keys are skewed after rotation by the eigenvectors of the queries' moments,
and only the 30 % of dims that matter most are multiplied. For each kv head the rows within ALPHA of its greatest score
are counted. Every kv head then reads as many rows, those of its greatest scores, as the mean of these counts, but no
more than the share that may be read. The first layer has no layer before it and is read whole.
"""

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages, Selection
from reprise.kernels.attention.selection import (
    ALWAYS,
    LOG2_E,
    Candidates,
    LayerMoments,
    SelectorInputs,
    as_selection,
    context_keys,
    most_rows,
    strongest,
    weights,
)

ALPHA = 5.0  # nats; what the paper takes for Llama-like models
DIMS = 0.3  # share of a head's dims


class InfinigenSelector:
    """A selector that chooses context rows by queries that were guessed one layer ahead. Made for one model; called by
    the engine's thread."""

    name = "infinigen"
    index_bytes_per_token = 0
    looks_ahead = True

    def __init__(self, inputs: SelectorInputs) -> None:
        self._share = inputs.share
        self.skews = [skew(layer) for layer in inputs.moments]  # directions by layer

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """Choose rows for one layer, as `KvSelector.choose` demands. queries: those guessed from the input of the layer
        before."""
        rows = {}
        for at, context in enumerate(candidates.contexts):
            keys = context_keys(kv, candidates.table[at], context)
            weight = skewed_weights(queries[at], keys, self.skews[layer])
            rows[at] = strongest(weight, how_many(weight, most_rows(context, self._share)))
        return as_selection(candidates, rows)


def skew(layer: LayerMoments) -> Tensor:
    """Return the directions that matter most, by kv head [kv_heads, k_dim, dims]: the eigenvectors of the queries'
    moments for which the root mean squares of queries and of keys have the largest product."""
    _, directions = torch.linalg.eigh(layer.queries)
    along = [(directions * (moments @ directions)).sum(1) for moments in (layer.queries, layer.keys)]
    strength = along[0].clamp_min(0).sqrt() * along[1].clamp_min(0).sqrt()  # [kv_heads, k_dim]
    dims = max(1, round(DIMS * directions.shape[2]))
    best = strength.topk(dims, dim=1).indices
    skewed: Tensor = directions.gather(2, best[:, None].expand(-1, directions.shape[1], -1))
    return skewed


def skewed_weights(queries: Tensor, keys: Tensor, directions: Tensor) -> Tensor:
    """Return the `weights` of context rows (log2 of softmax weights) by scores along some directions only, [kv_heads,
    rows]. queries fp32 [heads, k_dim], scaled to the base of 2; keys [rows, kv_heads, k_dim]; directions [kv_heads,
    k_dim, dims]."""
    group = queries.view(keys.shape[1], -1, queries.shape[1]) @ directions
    partial = keys.float().transpose(0, 1) @ directions
    return weights(group @ partial.transpose(1, 2))


def how_many(weight: Tensor, most: int) -> int:
    """Return how many rows to choose for each kv head: the mean number of rows within ALPHA of a head's greatest score,
    plus both ends of the context, and at most `most`. weight [kv_heads, rows], log2."""
    near = (weight > -ALPHA * LOG2_E).sum(1).float().mean()
    return min(most, 2 * ALWAYS + int(near))
