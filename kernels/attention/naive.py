"""Computes attention by its definition, as the reference: one sequence and one head group at a time, in fp32."""

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages


class NaiveAttention:
    """A backend that supports every feature, slowly. Tests compare all other backends with it."""

    name = "naive"
    page_multiple = 1

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        outs = [q.new_zeros(0, q.shape[1], kv.v_dim)]
        start = 0
        for i, (query_len, context_len) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
            rows = torch.arange(context_len, device=q.device)
            pages = meta.block_table[i].long()[rows // kv.k.shape[1]]
            k = kv.k[pages, rows % kv.k.shape[1]]
            v = kv.v[pages, rows % kv.v.shape[1]]
            k, v = kv.to_numbers(k, torch.float32), kv.to_numbers(v, torch.float32)
            chosen = None if params.selection is None else params.selection.of(i)
            outs.append(_attend(q[start : start + query_len], k, v, params, chosen).to(q.dtype))
            start += query_len
        return torch.cat(outs)


def _attend(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, chosen: list[Tensor] | None) -> Tensor:
    """Attend from the last rows of a context. q [queries, heads, k_dim], k [rows, kv_heads, k_dim], v [rows, kv_heads,
    v_dim] -> [queries, heads, v_dim] fp32. chosen: rows of the context, by kv head; None: all."""
    queries, heads, _ = q.shape
    rows, kv_heads, _ = k.shape
    k = k.float().repeat_interleave(heads // kv_heads, dim=1)
    v = v.float().repeat_interleave(heads // kv_heads, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * params.scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    at = torch.arange(rows - queries, rows, device=q.device)[:, None]
    key = torch.arange(rows, device=q.device)[None, :]
    seen = key <= at
    if params.window is not None:
        seen &= at - key < params.window
    logits = logits.masked_fill(~seen, float("-inf"))
    if chosen is not None:
        left_out = torch.ones(kv_heads, rows, dtype=torch.bool, device=q.device)
        for head, kept in enumerate(chosen):
            left_out[head, kept] = False
        logits = logits.masked_fill(left_out.repeat_interleave(heads // kv_heads, dim=0)[:, None], float("-inf"))
    if params.sinks is not None:
        logits = torch.cat((logits, params.sinks.float()[:, None, None].expand(-1, queries, 1)), dim=2)
    probs = logits.softmax(dim=2)[..., :rows]
    return torch.einsum("hqk,khd->qhd", probs, v)
