"""Computes paged attention on CPU: one SDPA call per sequence, without copies where its pages are adjacent. In bf16,
where compiled kernels can run, one call handles all sequences with a single query row, and another call all others.

Measured on one Zen 4 core (bf16, 12 heads over 4, head dim 64, context 1,124): SDPA on the strided pages, with the
query heads of a group packed into the query rows, takes 112 us per decode row. Gathering the pages first adds 216 us,
so the allocator hands out runs of pages and gathering is the exception. A prefill chunk attends to its history without
a mask and to itself causally, and merges both by their log-sum-exp: 2.1 ms against 3.1 for a masked product (125 rows
on 1,124). Compiled kernels on two cores that read 20 GB/s: 16 rows in 0.92 ms, which is 20 GB/s, where SDPA takes 2.5
ms. On one Zen 5 core, ms with SDPA -> compiled: 1,124 causal rows 36 -> 6.1, 155 on 1,700 11.9 -> 2.3, 8 on 1,024 0.49
-> 0.12.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.attention.ragged_batch import (
    AttentionMeta,
    AttentionParams,
    AttentionUnsupported,
    KvPages,
    Selection,
)
from reprise.kernels.attention.selection import LOG2_E
from reprise.kernels.cpu.available import decode_kernels, flash_kernels, prefill_kernels, select_kernels
from reprise.kernels.views import as_bf16, as_bits, as_stream

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Rows:
    """The place of one sequence's queries in the batch, and of its context in the pool. Rows of the pool are counted as
    page * page_size + row in the page."""

    query_start: int
    query_len: int
    context_len: int
    first_row: int | None  # first row of the context if its pages are adjacent
    pages: Tensor | None  # else: the pages


class TorchAttention:
    """A backend of torch's operations and compiled kernels. Works on any device, but is meant for CPU. Uses torch's
    threads."""

    name = "torch"
    page_multiple = 32
    _has_single_rows = True  # whether the decode kernels may take sequences of one row

    def __init__(self) -> None:
        self._flash = flash_kernels(exact=False)

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend as `AttentionBackend.forward` demands."""
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_dim)
        exact = params.softcap is not None or params.sinks is not None
        # The fused kernels need equal key and value widths and a positive scale, and exist only on CPU.
        fused = not exact and kv.k_dim == kv.v_dim and q.device.type == "cpu" and params.scale > 0
        single = many = False  # whether compiled kernels take sequences of one row, and of several rows
        takes_bf16 = not exact and q.dtype == torch.bfloat16 and fits_kernels(q.shape[1], kv)
        kernels = decode_kernels() if takes_bf16 and self._has_single_rows else None
        if kernels is not None:
            single = True
            _decode_together(kernels, q, kv, meta, params, out)
            if self._flash is not None and params.scale > 0 and _fits_flash(kv):
                many = True
                _prefill_together(self._flash, q, kv, meta, params, 2, out)
        if single and many:
            return out
        plan: list[_Rows] | None = meta.scratch.get("torch")
        if plan is None:
            plan = meta.scratch["torch"] = _plan(meta, kv.k.shape[1])
        for sequence, rows in enumerate(plan):
            if rows.query_len == 1 and single:
                continue
            queries = q[rows.query_start : rows.query_start + rows.query_len]
            chosen = None if params.selection is None else params.selection.of(sequence)
            if chosen is not None:
                pages = meta.block_table[sequence].long()
                out[rows.query_start] = attend_to_chosen(queries[0], kv, pages, chosen, params)
                continue
            first = _first_visible(rows, params.window)
            keys, values = _context(kv, rows, first)
            keys, values = kv.to_numbers(keys, q.dtype), kv.to_numbers(values, q.dtype)
            target = out[rows.query_start : rows.query_start + rows.query_len]
            windowed = params.window is not None and rows.context_len > params.window
            if rows.query_len == 1 and not exact:
                _decode(queries, keys, values, params.scale, target)
            elif fused and not windowed:
                _prefill(queries, keys, values, params.scale, target)
            else:
                _masked(queries, keys, values, params, target)
        return out


class ExactAttention(TorchAttention):
    """A backend whose result for a row has the same bits whatever else is in the batch, and however its prompt is cut.
    Every row, even a single one, goes through the kernel for many rows, whose blocks of keys begin at fixed positions.
    Where that kernel cannot run, this backend works like `TorchAttention` and promises nothing."""

    _has_single_rows = False

    def __init__(self, *, kind: str) -> None:
        """Set up. kind: a name for how the model's matrix products round on this processor. It becomes a part of the
        backend's name, because KV that was rounded in different ways must not be mixed."""
        self.name = f"torch-exact-{kind}"
        self._flash = flash_kernels(exact=True)

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend as `AttentionBackend.forward` demands. Raises AttentionUnsupported for a selection, which is not
        exact."""
        if params.selection is not None:
            raise AttentionUnsupported("exact attention is to whole contexts")
        plain = params.softcap is None and params.sinks is None and params.scale > 0
        if (
            self._flash is None
            or not plain
            or q.dtype != torch.bfloat16
            or not (fits_kernels(1, kv) and _fits_flash(kv))
        ):
            return super().forward(q, kv, meta, params)
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_dim)
        _prefill_together(self._flash, q, kv, meta, params, 1, out)
        return out


def fits_kernels(heads: int, kv: KvPages) -> bool:
    """Return whether the compiled kernels can attend to these pages."""
    return (
        kv.has_kernels
        and kv.k_dim % 16 == kv.v_dim % 16 == 0
        and heads // kv.k.shape[2] <= 8  # the sums of a group's heads must stay in registers
        and all(pool.device.type == "cpu" and pool.stride(3) == 1 for pool in (kv.k, kv.v))
    )


def _fits_flash(kv: KvPages) -> bool:
    """Return whether the compiled kernels for many query rows can read these pages too, which need sizes that are
    multiples of 32. The kernels for single rows must be able to read them."""
    return all(size % 32 == 0 for size in (kv.k.shape[1], kv.k_dim, kv.v_dim))


def _decode_together(
    kernels: ModuleType, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams, out: Tensor
) -> None:
    """Attend for all sequences with one query row."""
    if params.selection is not None:
        _attend_to_selection(params.selection, q, kv, meta, params, out)
    rows, tokens, parts = _decode_plan(kernels, meta, params)
    if not rows:
        return
    queries = q[tokens].float().mul_(params.scale * LOG2_E).numpy()
    mixed = torch.empty(len(rows), q.shape[1], kv.v_dim)
    table = meta.block_table[rows].numpy()
    group, k_lanes, v_lanes = ((0,) * size for size in (q.shape[1] // kv.k.shape[2], kv.k_dim // 16, kv.v_dim // 16))
    pools = (as_bits(as_bf16(pool)) for pool in (kv.k, kv.v))
    kernels.attend(queries, *pools, table, parts, group, k_lanes, v_lanes, kv.is_packed, mixed.numpy())
    out[tokens] = mixed.to(out.dtype)


def _prefill_together(
    kernels: ModuleType, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams, least: int, out: Tensor
) -> None:
    """Attend for all sequences with at least `least` query rows."""
    heads, k_dim = kv.k.shape[2], kv.k_dim
    key = f"torch flash {q.shape[1]} {heads} {k_dim} {kv.v_dim}"
    plan: tuple[np.ndarray, Tensor] | None = meta.scratch.get(key)
    if plan is None:
        tasks = kernels.plan(meta.query_lens, meta.context_lens, q.shape[1] // heads, heads, least)
        plan = meta.scratch[key] = (tasks, kernels.memory(torch.get_num_threads(), k_dim, kv.v_dim))
    tasks, memory = plan
    if len(tasks):
        table = meta.block_table.contiguous()
        pools = kv.k, kv.v, kv.is_packed
        kernels.attend(q.contiguous(), *pools, table, tasks, params.window, params.scale, memory, out)


def _decode_plan(kernels: ModuleType, meta: AttentionMeta, params: AttentionParams) -> tuple[list[int], Tensor, Any]:
    """Return the sequences with one query row that attend to all rows, the position of that row in the batch, and the
    tasks into which their attention is split."""
    chosen = () if params.selection is None else params.selection.sequences
    key = f"torch decode {params.window} {chosen}"
    plan: tuple[list[int], Tensor, Any] | None = meta.scratch.get(key)
    if plan is None:
        rows = [row for row, query_len in enumerate(meta.query_lens) if query_len == 1 and row not in chosen]
        contexts = [meta.context_lens[row] for row in rows]
        plan = meta.scratch[key] = (rows, meta.query_start[rows].long(), kernels.plan(contexts, params.window))
    return plan


def _attend_to_selection(
    selection: Selection, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams, out: Tensor
) -> None:
    """Attend for the sequences of a selection, on pages that fit the kernels."""
    sequences, kernels = list(selection.sequences), select_kernels()
    tokens = meta.query_start[sequences].long()
    if kernels is None:
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            chosen = selection.of(sequence)
            assert chosen is not None
            out[token] = attend_to_chosen(q[token], kv, meta.block_table[sequence].long(), chosen, params)
        return
    queries = q[tokens].float().mul_(params.scale * LOG2_E).numpy()
    out[tokens] = attend_selected(kernels, queries, kv, meta.block_table[sequences].numpy(), selection).to(out.dtype)


def attend_selected(
    kernels: ModuleType, queries: np.ndarray, kv: KvPages, table: np.ndarray, selection: Selection
) -> Tensor:
    """Attend to the context rows of a selection by the compiled kernel. queries fp32 [sequences of the selection,
    heads, k_dim], multiplied by scale * log2(e); table int32 [sequences, pages] -> fp32 [sequences, heads, v_dim]."""
    count, heads, _ = queries.shape
    mixed = torch.empty(count, heads, kv.v.shape[3])
    sizes = heads // kv.k.shape[2], kv.k.shape[3] // 16, kv.v.shape[3] // 16
    chosen = (table, selection.rows.numpy(), selection.counts.numpy())
    kernels.attend(queries, as_bits(kv.k), as_bits(kv.v), *chosen, *((0,) * size for size in sizes), mixed.numpy())
    return mixed


def attend_to_chosen(q: Tensor, kv: KvPages, pages: Tensor, chosen: list[Tensor], params: AttentionParams) -> Tensor:
    """Compute attention of one query row, q [heads, k_dim], the last of a context, to chosen rows of it. chosen: for
    each kv head the indices of the rows in the context. pages int64 [pages]: the context's. Returns [heads, v_dim]."""
    page_size, heads = kv.k.shape[1], q.shape[0]
    per_head = heads // kv.k.shape[2]
    mixed = []
    for head, rows in enumerate(chosen):
        page, row = pages[rows // page_size], rows % page_size
        queries = q[head * per_head : (head + 1) * per_head].float()
        scores = queries @ kv.k[page, row, head].float().T * params.scale
        mixed.append(scores.softmax(-1) @ kv.v[page, row, head].float())
    return torch.cat(mixed).to(q.dtype)


def _plan(meta: AttentionMeta, page_size: int) -> list[_Rows]:
    table = meta.block_table.cpu().numpy()
    plan, query_start = [], 0
    for row, (query_len, context_len) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
        pages = table[row, : -(-context_len // page_size)]
        in_a_row = bool((np.diff(pages) == 1).all())
        plan.append(
            _Rows(
                query_start=query_start,
                query_len=query_len,
                context_len=context_len,
                first_row=int(pages[0]) * page_size if in_a_row else None,
                pages=None if in_a_row else meta.block_table[row, : len(pages)].long(),
            )
        )
        query_start += query_len
    return plan


def _first_visible(rows: _Rows, window: int | None) -> int:
    """Return the first context row that any of the queries can see."""
    return 0 if window is None else max(0, rows.context_len - rows.query_len + 1 - window)


def _context(kv: KvPages, rows: _Rows, first: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [context rows from `first`, kv_heads, dim]: views if the pages are adjacent, otherwise
    copies."""
    if rows.first_row is not None:
        span = slice(rows.first_row + first, rows.first_row + rows.context_len)
        return kv.k.flatten(0, 1)[span], kv.v.flatten(0, 1)[span]
    assert rows.pages is not None
    span = slice(first, rows.context_len)
    return kv.k[rows.pages].flatten(0, 1)[span], kv.v[rows.pages].flatten(0, 1)[span]


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """Attend from one row, q [1, heads, dim]. The heads of a group become query rows, so keys are read once and never
    repeated."""
    kv_heads = k.shape[1]
    packed = q.view(1, kv_heads, -1, q.shape[2])
    result = F.scaled_dot_product_attention(packed, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
    out.copy_(result.view(1, q.shape[1], v.shape[2]))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """View [rows, kv_heads, dim] as [kv_heads, groups, rows, dim]."""
    return x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """Attend causally from the last len(q) of len(k) rows."""
    query_len, heads, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    history = k.shape[0] - query_len
    target = out.view(query_len, kv_heads, groups, dim)
    queries = q.view(query_len, kv_heads, groups, dim).permute(1, 2, 0, 3)
    own, own_lse = _flash(queries, _grouped(k[history:], groups), _grouped(v[history:], groups), 0.0, True, scale=scale)
    if history:
        packed = queries.reshape(1, kv_heads, groups * query_len, dim)
        old, old_lse = _flash(
            packed, k[:history].transpose(0, 1)[None], v[:history].transpose(0, 1)[None], 0.0, False, scale=scale
        )
        old, old_lse = old.view(own.shape), old_lse.view(own.shape[:3])
        kernels = prefill_kernels() if out.dtype == torch.bfloat16 else None
        if kernels is not None:
            _merge(kernels, own, own_lse, old, old_lse, target)
            return
        share = torch.sigmoid(old_lse - own_lse)[..., None]
        own = torch.lerp(own.float(), old.float(), share.float())
    target.copy_(own.permute(2, 0, 1, 3))


def _merge(kernels: ModuleType, own: Tensor, own_lse: Tensor, old: Tensor, old_lse: Tensor, out: Tensor) -> None:
    """Merge the attention of rows to the keys of their own chunk (own) and to earlier keys (old). Both are [kv_heads,
    groups, rows, dim], each with a log-sum-exp per row; out [rows, kv_heads, groups, dim]."""
    parts = []
    for x in (own, own_lse, old, old_lse):
        parts += [as_stream(x), x.stride()[:3]]
    kernels.merge(*parts, as_bits(out))


def _masked(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, out: Tensor) -> None:
    """Attend with window, softcap or sinks, with scores in fp32."""
    query_len, heads, dim = q.shape
    kv_heads, rows = k.shape[1], k.shape[0]
    packed = q.view(query_len, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(packed, k.permute(1, 2, 0)).float().view(kv_heads, -1, query_len, rows)
    scores *= params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    distance = torch.arange(rows - query_len, rows, device=q.device)[:, None] - torch.arange(rows, device=q.device)
    hidden = distance < 0
    if params.window is not None:
        hidden |= distance >= params.window
    scores.masked_fill_(hidden, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, query_len, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    mixed = torch.bmm(weights.to(v.dtype).view(kv_heads, -1, rows), v.transpose(0, 1))
    out.copy_(mixed.view(kv_heads, -1, query_len, v.shape[2]).permute(2, 0, 1, 3).reshape(query_len, heads, -1))
