"""Computes attention of one sequence over its context in pieces, which need not be in memory at the same time."""

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import AttentionParams

_QUERIES = 256  # queries at a time: with pieces of 512 rows and 32 heads, logits take 16 MB


class RunningSoftmax:
    """Attention that reads a context in several portions, as in an online softmax: it keeps the largest logit, the sum
    of exponentials and the weighted sum of values so far, in fp32. But for the order of sums, the result equals
    attention to the whole context at once. Supports everything in `AttentionParams` but a selection, which is ignored:
    all rows are read."""

    def __init__(self, q: Tensor, first: int, params: AttentionParams, v_dim: int) -> None:
        """Begin without any piece. q [queries, heads, k_dim]: queries of the context's rows from `first` on."""
        queries, heads, _ = q.shape
        self._q, self._first, self._params = q.transpose(0, 1), first, params
        self._most = q.new_full((heads, queries, 1), float("-inf"), dtype=torch.float32)
        self._sum = q.new_zeros((heads, queries, 1), dtype=torch.float32)
        self._out = q.new_zeros((heads, queries, v_dim), dtype=torch.float32)

    def sees(self, first_row: int, last_row: int) -> bool:
        """Return whether any query sees any of the context rows `first_row` to `last_row`."""
        queries, window = self._q.shape[1], self._params.window
        return first_row < self._first + queries and (window is None or self._first - last_row < window)

    def add(self, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Attend to some rows of the context, each given once. rows [n] int64: their indices in the context; k [n,
        kv_heads, k_dim], v [n, kv_heads, v_dim]."""
        kv_heads = k.shape[1]
        keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)  # both [kv_heads, ...]
        for start in range(0, self._q.shape[1], _QUERIES):
            part = slice(start, start + _QUERIES)
            q = self._q[:, part].float()
            heads, queries, _ = q.shape
            logits = q.reshape(kv_heads, -1, q.shape[2]) @ keys * self._params.scale
            logits = self._masked(logits.view(heads, queries, -1), self._first + start, rows)
            most = torch.maximum(self._most[:, part], logits.amax(-1, keepdim=True))
            shift = most.masked_fill(most == float("-inf"), 0.0)  # 0 for queries that have seen no row yet
            before, weights = (self._most[:, part] - shift).exp(), (logits - shift).exp()
            self._most[:, part] = most
            self._sum[:, part] = self._sum[:, part] * before + weights.sum(-1, keepdim=True)
            mixed = (weights.view(kv_heads, -1, weights.shape[2]) @ values).view(heads, queries, -1)
            self._out[:, part] = self._out[:, part] * before + mixed

    def _masked(self, logits: Tensor, first: int, rows: Tensor) -> Tensor:
        """Return logits in which the rows that a query must not see are -inf. logits [heads, queries, rows]; first: the
        first query's row."""
        if self._params.softcap is not None:
            logits = self._params.softcap * torch.tanh(logits / self._params.softcap)
        at = torch.arange(first, first + logits.shape[1], device=rows.device)[:, None]
        hidden = rows > at
        if self._params.window is not None:
            hidden |= at - rows >= self._params.window
        return logits.masked_fill(hidden, float("-inf"))

    def result(self) -> Tensor:
        """Return the attention [queries, heads, v_dim] fp32. Every query must have seen a row, at least its own."""
        total = self._sum
        if self._params.sinks is not None:
            sinks = self._params.sinks.float()[:, None, None]
            most = torch.maximum(self._most, sinks)
            kept = (self._most - most).exp()
            return (self._out * kept / (total * kept + (sinks - most).exp())).transpose(0, 1)
        return (self._out / total).transpose(0, 1)
