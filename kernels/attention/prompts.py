"""Computes attention of prompts by torch's own flash kernel. That kernel reads no pages, so a sequence's pages are
gathered first.

Rows attend to their history and to each other in two calls, because the kernel aligns its causal mask to the first key.
The logs of both sums say how to mix the results.

Measured for one layer of an 8 B model on an H200, in ms. 2,048 rows after 26,000: gathering 0.2 and the kernel over all
keys 2.7, against 5.5 for `triton_paged`. 101 rows after 28,000: 0.1 and 0.2, against 1.4. torch's cuDNN kernel takes
1.5 and 0.4, but 55 to 70 for every length that it has not seen.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages

_LEAST_ROWS = 64  # query rows for which a sequence is worth it
_LEAST_CONTEXT = 4096  # rows of context for which it is worth it: gathering is a small part then
_MOST_DIM = 256

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""A function of (q [1, heads, rows, dim], k and v [1, kv_heads, keys, dim], scale, causal) that returns the result [1,
heads, rows, dim] and the logs of the softmax sums [1, heads, rows] in fp32. Causal: row i sees the keys up to i."""


class PromptAttention:
    """A part of `TritonPagedAttention` that computes the attention of sequences with many query rows by torch's flash
    kernel. Asynchronous, on the current stream."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def takes(self, q: Tensor, kv: KvPages, params: AttentionParams) -> bool:
        """Return whether torch's flash kernel can compute this layer: numbers of 16 bits, heads of a suitable size, and
        no window, softcap or sinks."""
        dim = q.shape[2]
        return (
            q.dtype in (torch.bfloat16, torch.float16)
            and params.window is None
            and params.softcap is None
            and params.sinks is None
            and kv.v.shape[3] == dim <= _MOST_DIM
            and dim % 8 == 0
        )

    @staticmethod
    def is_long(rows: int, context: int) -> bool:
        """Return whether a sequence with so many query rows and context rows is long enough for this kernel to be
        faster, in spite of the gathering of its pages."""
        return rows >= _LEAST_ROWS or context >= _LEAST_CONTEXT

    def forward(
        self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams, sequence: int, out: Tensor
    ) -> None:
        """Compute one sequence's rows and write them to its part of `out` [tokens, heads, dim]."""
        rows, context = meta.query_lens[sequence], meta.context_lens[sequence]
        first = sum(meta.query_lens[:sequence])
        history = context - rows
        num_pages = -(-context // kv.k.shape[1])
        pages = meta.block_table[sequence, :num_pages]
        k, v = (x.index_select(0, pages).flatten(0, 1)[:context].transpose(0, 1)[None] for x in (kv.k, kv.v))
        queries = q[first : first + rows].transpose(0, 1)[None]
        result, sums = self._attend(queries, k[:, :, history:], v[:, :, history:], params.scale, True)
        if history:
            past, past_sums = self._attend(queries, k[:, :, :history], v[:, :, :history], params.scale, False)
            share = torch.sigmoid(past_sums - sums)[..., None]  # share of the past in all weights
            result = torch.lerp(result.float(), past.float(), share)
        out[first : first + rows] = result[0].transpose(0, 1)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Call torch's flash kernel. q [1, heads, rows, dim]; k, v [1, kv_heads, keys, dim]. causal: row i sees the keys up
    to i. Returns (attention, of q's shape; logs of the softmax sums, fp32 [1, heads, rows]). Raises RuntimeError or
    NotImplementedError where it cannot run."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def prompt_attention() -> PromptAttention | None:
    """Return a PromptAttention for this CUDA device. None if there is no such device, or if a trial gives other results
    than attention computed by its definition."""
    if not torch.cuda.is_available():
        return None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 24, 64, generator=generator).bfloat16().cuda() for heads in (4, 2, 2))
    try:
        for causal in (True, False):
            result, sums = flash(q, k, v, 0.125, causal)
            wide_k, wide_v = (x.float().repeat_interleave(2, 1) for x in (k, v))
            scores = 0.125 * (q.float() @ wide_k.transpose(2, 3))
            if causal:
                scores.masked_fill_(torch.ones(24, 24, device=q.device).triu(1).bool(), float("-inf"))
            wanted = scores.softmax(-1) @ wide_v
            if sums.shape != (1, 4, 24) or not torch.allclose(sums, scores.logsumexp(-1), atol=0.02):
                return None
            if not torch.allclose(result.float(), wanted, atol=0.05):
                return None
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return PromptAttention(flash)
