"""Runs flash-attn 2 over pages. It works on CUDA only, in fp16 and bf16, with keys and values of equal width up to 256
and without sinks.

Its tests carry the `gpu` mark.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.attention.ragged_batch import (
    AttentionMeta,
    AttentionParams,
    AttentionUnsupported,
    BackendUnavailable,
    KvPages,
)

try:
    from flash_attn import flash_attn_varlen_func
except ImportError as error:
    raise BackendUnavailable(f"flash-attn is not installed: {error}") from error


class FlashAttention:
    """A backend that calls flash-attn once per layer for all sequences (varlen), on the current stream,
    asynchronously."""

    name = "flash"
    page_multiple = 256  # flash-attn 2 refuses other page sizes

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailable("flash-attn needs a CUDA device")

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend as `AttentionBackend.forward` demands. Raises AttentionUnsupported for sinks, a selection, other
        dtypes, and heads of unequal or larger widths."""
        if params.sinks is not None:
            raise AttentionUnsupported("flash-attn 2 has no attention sinks")
        if params.selection is not None:
            raise AttentionUnsupported("flash-attn 2 attends to whole contexts")
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise AttentionUnsupported(f"flash-attn 2 computes in float16 and bfloat16, not in {q.dtype}")
        if kv.k.shape[3] != kv.v.shape[3] or kv.k.shape[3] > 256:
            raise AttentionUnsupported(f"flash-attn 2 cannot do heads of {kv.k.shape[3]} keys, {kv.v.shape[3]} values")
        context_start = meta.scratch.get("flash")
        if context_start is None:
            context_start = F.pad(meta.context_len.cumsum(0, dtype=torch.int32), (1, 0))
            meta.scratch["flash"] = context_start
        out: Tensor = flash_attn_varlen_func(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=meta.query_start,
            cu_seqlens_k=context_start,
            max_seqlen_q=max(meta.query_lens),
            max_seqlen_k=max(meta.context_lens),
            softmax_scale=params.scale,
            causal=True,  # aligned to the end of the context, as in our backends
            # flash-attn does not count the query itself
            window_size=(-1, -1) if params.window is None else (params.window - 1, 0),
            softcap=params.softcap or 0.0,
            block_table=meta.block_table,
        )
        return out
