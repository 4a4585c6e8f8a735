"""Measures how the ends of prompts attend to the blocks of their contexts (SnapKV, arXiv 2404.14469)."""

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages

_ROWS = 32  # last rows of a chunk, whose attention is watched
_LAYERS = 4  # about so many layers are watched, evenly spread


class WatchedAttention:
    """A backend that returns another backend's results. Besides, in some of the layers that see the whole context, it
    computes the probabilities that the last rows of each chunk give to the rows of their context. That costs the
    products of those rows once more: for 32 of 512 rows in 4 of 30 layers, less than a hundredth of the attention. Rows
    that are decoded are not watched."""

    def __init__(self, inner: AttentionBackend, *, num_layers: int, block_tokens: int) -> None:
        self.name, self.page_multiple = inner.name, inner.page_multiple
        self._inner = inner
        self._stride = max(1, num_layers // _LAYERS)
        self._block_tokens = block_tokens
        self._layers_seen = 0  # layers of this step so far that see whole contexts
        self._sums: dict[int, Tensor] = {}  # sequence of the step -> probability by block, summed over watched layers
        self._counts: dict[int, int] = {}

    def begin(self, meta: AttentionMeta) -> bool:
        """Begin a step, forgetting the last one. Returns whether any of its sequences is watched."""
        self._layers_seen, self._sums, self._counts = 0, {}, {}
        return max(meta.query_lens, default=0) > 1

    def take(self) -> dict[int, list[float]]:
        """Return, by sequence of the step, the share of its attention that each block of its context got, in order: the
        mean over the watched rows and layers. The shares add up to 1, or less where sinks took some."""
        shares = {sequence: (total / self._counts[sequence]).tolist() for sequence, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return shares

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        if params.window is None:
            if self._layers_seen % self._stride == self._stride // 2:
                self._watch(q, kv, meta, params)
            self._layers_seen += 1
        return self._inner.forward(q, kv, meta, params)

    def _watch(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> None:
        end, page_size = 0, kv.k.shape[1]
        for sequence, (query_len, context_len) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
            end += query_len
            if query_len < 2:
                continue
            pages = meta.block_table[sequence, : -(-context_len // page_size)].long()
            keys = kv.to_numbers(kv.k[pages].flatten(0, 1)[:context_len], q.dtype)
            found = probabilities(q[end - min(_ROWS, query_len) : end], keys, params)
            blocks = -(-context_len // self._block_tokens)
            padded = torch.nn.functional.pad(found, (0, blocks * self._block_tokens - context_len))
            total = padded.view(blocks, self._block_tokens).sum(1)
            self._sums[sequence] = self._sums[sequence] + total if sequence in self._sums else total
            self._counts[sequence] = self._counts.get(sequence, 0) + 1


def probabilities(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """Return the mean probability that the last rows of a context give to each of its rows, [rows] fp32. q [queries,
    heads, dim], k [rows, kv_heads, dim], both rotated. Computes one kv head at a time: with a context of 128k rows, a
    group of 4 heads takes 64 MB."""
    queries, heads, _ = q.shape
    rows, kv_heads, _ = k.shape
    group = heads // kv_heads
    hidden = torch.arange(rows, device=q.device) > torch.arange(rows - queries, rows, device=q.device)[:, None]
    total = torch.zeros(rows, device=q.device)
    for head in range(kv_heads):
        own = q[:, head * group : (head + 1) * group].transpose(0, 1)  # [group, queries, dim]
        logits = (own @ k[:, head].T).float() * params.scale
        if params.softcap is not None:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        logits.masked_fill_(hidden, float("-inf"))
        if params.sinks is not None:
            sinks = params.sinks[head * group : (head + 1) * group].float()[:, None, None].expand(-1, queries, 1)
            logits = torch.cat((logits, sinks), -1)
        total += logits.softmax(-1)[..., :rows].sum((0, 1))
    return total / (heads * queries)
