"""Defines attention to a part of a context: the interface of a selector of KV, and how the strongest rows are taken.

Only sequences that decode one row, after a context of some length, read it in part. Nothing is dropped: a row that one
query leaves out is there for the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages, Selection

LOG2_E = 1.4426950408889634
ALWAYS = 32  # rows at either end of a context that are always read: its first and its newest block
LEAST_CONTEXT = 4 * ALWAYS  # below this there is nothing to choose


@dataclass(frozen=True, slots=True)
class Candidates:
    """The sequences of one step that may attend to a part of their contexts, in the order of the batch."""

    sequences: tuple[int, ...]
    tokens: Tensor  # [sequences] int64: their rows in the batch
    contexts: list[int]
    table: Tensor  # [sequences, pages] int32
    owners: list[int]  # see AttentionMeta.partial


def find_candidates(meta: AttentionMeta, min_context: int) -> Candidates | None:
    """Return the sequences of a step that are allowed to attend to a part of their contexts only: those in
    `meta.partial` with one query row and a context of at least `min_context` (and LEAST_CONTEXT) rows. None if there
    are none."""
    least = max(min_context, LEAST_CONTEXT)
    found = [i for i in sorted(meta.partial) if meta.query_lens[i] == 1 and meta.context_lens[i] >= least]
    if not found:
        return None
    return Candidates(
        sequences=tuple(found),
        tokens=meta.query_start[found].long(),
        contexts=[meta.context_lens[i] for i in found],
        table=meta.block_table[found],
        owners=[meta.partial[i] for i in found],
    )


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """The second moments of one layer's rotated queries and keys on calibration texts: for every two dims of a head,
    the mean of their product."""

    queries: Tensor  # [kv_heads, k_dim, k_dim]: mean of the outer product with itself, over a group's heads and tokens
    keys: Tensor  # [kv_heads, k_dim, k_dim]
    pairs: Tensor  # [pairs, 2] int64: dims that a rotation turns together, as far as it is known


@dataclass(frozen=True, slots=True)
class Selecting:
    """A selector of the context rows that decode steps read, and the least length of contexts for which it is used.
    Shorter contexts are read whole."""

    selector: "KvSelector"
    min_context: int

    def of_step(self, meta: AttentionMeta) -> "StepSelection | None":
        """Return the selector with the sequences of this step for which it chooses rows; None if all sequences read
        their whole contexts."""
        if not meta.partial:
            return None
        candidates = find_candidates(meta, self.min_context)
        return None if candidates is None else StepSelection(self.selector, candidates)

    def takes(self, context: int) -> bool:
        """Return whether a context of this many rows is long enough to be read in part."""
        return context >= max(self.min_context, LEAST_CONTEXT)


@dataclass(frozen=True, slots=True)
class SelectorInputs:
    """The arguments for making a selector, which chooses the rows of long contexts that decode steps read."""

    share: float  # share of a context's rows that may be read, both ends included
    num_pages: int  # pages of the pool
    page_size: int
    moments: Sequence[LayerMoments]  # statistics by layer


class KvSelector(Protocol):
    """A selector of the rows of long contexts that decoding sequences attend to. Called by the engine's thread only."""

    name: str
    index_bytes_per_token: int  # bytes beside the pool, over all layers
    looks_ahead: bool  # it gets guesses of queries, made one layer ahead; layers without one are read whole

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """Choose rows for one layer, after the step's keys are in their pages. queries fp32 [candidates, heads, k_dim],
        rotated, multiplied by the layer's scale * log2(e). Returns None where the whole context is to be read. The
        first and the newest 32 rows of a context are always chosen."""
        ...


@dataclass(frozen=True, slots=True)
class StepSelection:
    """A selector of context rows, with the sequences of one step (candidates) for which it chooses rows."""

    selector: KvSelector
    candidates: Candidates
    guesses: dict[int, Tensor] = field(default_factory=dict)  # layer -> as `queries`, for selectors that look ahead

    def of_layer(self, layer: int, queries: Tensor, kv: KvPages, params: AttentionParams) -> Selection | None:
        """Return the context rows that one layer reads, as `KvSelector.choose` does; None to read all: in layers with a
        window, softcap or sinks, and for a selector that `looks_ahead` in layers for which no queries were guessed."""
        if params.window is not None or params.softcap is not None or params.sinks is not None:
            return None
        if self.selector.looks_ahead:
            guess = self.guesses.pop(layer, None)
            return None if guess is None else self.selector.choose(layer, guess, kv, self.candidates)
        return self.selector.choose(layer, queries, kv, self.candidates)


def most_rows(context: int, share: float) -> int:
    """Return the most rows of a context that a query reads: `share` of them, but at least one more than the 2 * ALWAYS
    rows at both ends, which are always read. Never more than the context has."""
    return min(context, max(2 * ALWAYS + 1, int(share * context)))


def context_keys(kv: KvPages, pages: Tensor, context: int) -> Tensor:
    """Return a context's keys [rows, kv_heads, k_dim], gathered. pages [at least its pages] int32."""
    used = pages[: -(-context // kv.k.shape[1])].long()
    return kv.k[used].flatten(0, 1)[:context]


def weights(scores: Tensor) -> Tensor:
    """Return log2 of each context row's softmax weight relative to the largest weight of the same query head,
    [kv_heads, rows]. Of the query heads that share a kv head, the one with the greatest value counts. scores fp32
    [kv_heads, group, rows]: logits to the base of 2."""
    return (scores - scores.amax(-1, keepdim=True)).amax(1)


def strongest(weight: Tensor, most: int) -> Tensor:
    """Return the indices of `most` context rows, int32 [kv_heads, most], ascending: the first and last ALWAYS rows, and
    those of the greatest weight. weight [kv_heads, rows], as from `weights`."""
    weight = weight.clone()
    weight[:, :ALWAYS] = weight[:, -ALWAYS:] = float("inf")
    return weight.topk(most, dim=-1).indices.sort(-1).values.int()


def as_selection(candidates: Candidates, rows: Mapping[int, Tensor]) -> Selection:
    """Return the rows chosen for several candidates (sequences of a step) as one Selection. rows: index among the
    candidates -> [kv_heads, chosen] int32."""
    kv_heads, most = next(iter(rows.values())).shape[0], max(chosen.shape[1] for chosen in rows.values())
    padded = torch.zeros(len(rows), kv_heads, most, dtype=torch.int32)
    counts = torch.empty(len(rows), kv_heads, dtype=torch.int64)
    for at, chosen in rows.items():
        padded[at, :, : chosen.shape[1]] = chosen
        counts[at] = chosen.shape[1]
    return Selection(candidates.sequences, padded, counts)
