"""Computes paged attention in Triton: with every feature, on any CUDA device, and on CPU tensors in Triton's
interpreter.

The interpreter (TRITON_INTERPRET=1 in the environment before triton is imported) proves indexing and arithmetic. That
the kernels compile is tested by compiling them for CUDA targets, which needs no device. Runs of the compiled kernels
are tests with the `gpu` mark. For that reason they use conservative features only: no autotuning, no descriptors, no
persistent programs.

The work list is made on the host, once per step and window. An item of the list is a block of query rows of one
sequence, with the heads that share a kv head side by side, against a range of its keys. A sequence with few query rows
(decode) is split along its keys into ranges of fixed length, whose results a second kernel merges (flash-decoding). The
length does not depend on the batch, so neither does the result of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reprise.kernels.attention.prompts import PromptAttention, prompt_attention
from reprise.kernels.attention.ragged_batch import (
    AttentionMeta,
    AttentionParams,
    AttentionUnsupported,
    BackendUnavailable,
    KvPages,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise BackendUnavailable(f"triton is not installed: {error}") from error

_SPLIT = 512  # keys per item of a decoding sequence
_ALIGN = 64  # a window's start is rounded down to this, so that tiles cover the same keys in every step
_PREFILL_ROWS = 64
_DECODE_ROWS = 16  # the smallest size that tl.dot accepts


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    top: tl.tensor, weight: tl.tensor, mixed: tl.tensor, sink_ptr: tl.tensor, heads: tl.tensor, has_sink: tl.constexpr
) -> tl.tensor:
    """Return attention's results [rows, dims] from running sums. top, weight [rows]: maximum of the logits and sum of
    their exponentials; mixed [rows, dims]: sum of the weighted values. heads [rows]: the query head of each row, whose
    sink (a logit without a value, at sink_ptr) is included if `has_sink`."""
    if has_sink:
        sink = tl.load(sink_ptr + heads).to(tl.float32)
        highest = tl.maximum(top, sink)
        shrink = tl.exp(top - highest)
        weight = weight * shrink + tl.exp(sink - highest)
        mixed = mixed * shrink[:, None]
    return mixed / tl.where(weight > 0, weight, 1.0)[:, None]


# Width of the block table and window change while serving: compiled for any, lest a turn wait for a compiler.
@triton.jit(do_not_specialize=["table_row", "window"])  # type: ignore[untyped-decorator]
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    items_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_mixed_ptr: tl.tensor,
    part_stats_ptr: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    table_row: tl.tensor,
    q_token: tl.tensor,  # strides in elements: token, head; page, row of a page, kv head of a row
    q_head: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    window: tl.tensor,
    group: tl.constexpr,  # query heads per kv head
    rows: tl.constexpr,
    tile: tl.constexpr,
    page_size: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    k_padded: tl.constexpr,
    v_padded: tl.constexpr,
    has_window: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sink: tl.constexpr,
    precision: tl.constexpr,
    widen: tl.constexpr,  # multiply in fp32, because the interpreter's dot treats bf16 as integers
) -> None:
    """Compute one item of the work list for one kv head. An item: sequence, first token in q, its position, number of
    tokens, first and end of its keys, and its index among the parts, or -1 to write the final result."""
    item = items_ptr + tl.program_id(0) * 7
    kv_head = tl.program_id(1)
    sequence = tl.load(item).to(tl.int64)
    first_token = tl.load(item + 1)
    first_position = tl.load(item + 2)
    tokens = tl.load(item + 3)
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    part = tl.load(item + 6)

    row = tl.arange(0, rows)
    row_live = row < tokens * group
    token = (first_token + row // group).to(tl.int64)
    head = kv_head * group + row % group
    position = first_position + row // group
    k_col = tl.arange(0, k_padded)
    v_col = tl.arange(0, v_padded)
    q = tl.load(
        q_ptr + token[:, None] * q_token + head[:, None] * q_head + k_col[None, :],
        mask=row_live[:, None] & (k_col[None, :] < k_dim),
        other=0.0,
    )
    if widen:
        q = q.to(tl.float32)

    top = tl.full([rows], float("-inf"), tl.float32)
    weight = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, v_padded], tl.float32)
    for start in range(begin, end, tile):
        key = start + tl.arange(0, tile)
        key_live = key < end
        page = tl.load(table_ptr + sequence * table_row + key // page_size, mask=key_live, other=0).to(tl.int64)
        k_at = page * k_page + (key % page_size) * k_row + kv_head * k_head
        k = tl.load(
            k_ptr + k_at[None, :] + k_col[:, None], mask=key_live[None, :] & (k_col[:, None] < k_dim), other=0.0
        )
        if widen:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision=precision) * scale
        if has_softcap:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        seen = row_live[:, None] & key_live[None, :] & (key[None, :] <= position[:, None])
        if has_window:
            seen = seen & (position[:, None] - key[None, :] < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # 0 for a row that has seen no key yet
        share = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        weight = weight * shrink + tl.sum(share, 1)
        v_at = page * v_page + (key % page_size) * v_row + kv_head * v_head
        v = tl.load(
            v_ptr + v_at[:, None] + v_col[None, :], mask=key_live[:, None] & (v_col[None, :] < v_dim), other=0.0
        )
        share = share.to(v.dtype)
        if widen:
            share = share.to(tl.float32)
            v = v.to(tl.float32)
        mixed = mixed * shrink[:, None] + tl.dot(share, v, input_precision=precision)
        top = new_top

    if part < 0:
        result = _finish(top, weight, mixed, sink_ptr, tl.where(row_live, head, 0), has_sink)
        tl.store(
            out_ptr + token[:, None] * out_token + head[:, None] * out_head + v_col[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=row_live[:, None] & (v_col[None, :] < v_dim),
        )
    else:
        place = part.to(tl.int64) * tl.num_programs(1) + kv_head
        tl.store(part_mixed_ptr + (place * rows + row[:, None]) * v_padded + v_col[None, :], mixed)
        tl.store(part_stats_ptr + place * 2 * rows + row, top)
        tl.store(part_stats_ptr + place * 2 * rows + rows + row, weight)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    merges_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_mixed_ptr: tl.tensor,
    part_stats_ptr: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    group: tl.constexpr,
    rows: tl.constexpr,
    v_dim: tl.constexpr,
    v_padded: tl.constexpr,
    has_sink: tl.constexpr,
) -> None:
    """Merge the parts of one split block for one kv head. A merge, an entry of the second work list: first token in q,
    number of tokens, first part, number of parts."""
    merge = merges_ptr + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    first_token = tl.load(merge)
    tokens = tl.load(merge + 1)
    first_part = tl.load(merge + 2)
    parts = tl.load(merge + 3)

    row = tl.arange(0, rows)
    v_col = tl.arange(0, v_padded)
    top = tl.full([rows], float("-inf"), tl.float32)
    weight = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, v_padded], tl.float32)
    for part in range(first_part, first_part + parts):
        place = tl.cast(part, tl.int64) * tl.num_programs(1) + kv_head
        part_top = tl.load(part_stats_ptr + place * 2 * rows + row)
        part_weight = tl.load(part_stats_ptr + place * 2 * rows + rows + row)
        part_mixed = tl.load(part_mixed_ptr + (place * rows + row[:, None]) * v_padded + v_col[None, :])
        new_top = tl.maximum(top, part_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - base)
        share = tl.exp(part_top - base)
        weight = weight * shrink + part_weight * share
        mixed = mixed * shrink[:, None] + part_mixed * share[:, None]
        top = new_top

    row_live = row < tokens * group
    token = (first_token + row // group).to(tl.int64)
    head = kv_head * group + row % group
    result = _finish(top, weight, mixed, sink_ptr, tl.where(row_live, head, 0), has_sink)
    tl.store(
        out_ptr + token[:, None] * out_token + head[:, None] * out_head + v_col[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & (v_col[None, :] < v_dim),
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    """One grid of programs and its work list: items [items, 7] and merges [merges, 4] int32 on the device, in the
    kernels' format. kind: the layers that it is for, (query heads to a kv head, window)."""

    kind: tuple[int, int | None]
    rows: int
    items: Tensor
    merges: Tensor
    parts: int


def _warps(rows: int, v_padded: int) -> int:
    """Return how many warps a program of `_attend` has, so that the sums that a thread keeps fit into its registers.
    The program's sums are fp32 [rows, v_padded]."""
    return 8 if rows * v_padded >= 8192 else 4


class TritonPagedAttention:
    """A backend of Triton kernels. Runs asynchronously on the current stream of a CUDA device, or in the interpreter if
    triton was imported for it."""

    name = "triton"
    page_multiple = 16

    def __init__(self) -> None:
        self._interpreted = not isinstance(_attend, triton.JITFunction)
        self._prompts = prompt_attention()
        if not self._interpreted and not torch.cuda.is_available():
            raise BackendUnavailable("Triton needs a CUDA device, or TRITON_INTERPRET=1 to interpret its kernels")

    @staticmethod
    def _long(meta: AttentionMeta, group: int) -> list[int]:
        """Return the sequences of a step that have so many query rows that torch's flash kernel is faster for them."""
        least = _decode_rows(group)
        lens = enumerate(zip(meta.query_lens, meta.context_lens, strict=True))
        return [i for i, (rows, context) in lens if rows * group > least and PromptAttention.is_long(rows, context)]

    @staticmethod
    def num_items(context_lens: Sequence[int]) -> int:
        """Return the most items (ranges of keys, into which contexts are split) in a step in which every sequence has
        one query row and these are the contexts' lengths."""
        return sum(-(-length // _SPLIT) for length in context_lens) + len(context_lens)  # windows begin anywhere

    @staticmethod
    def plans(scratch: dict[str, Any], most_items: int, most_sequences: int) -> dict[str, "DecodePlan"]:
        """Return for each kind of layers a DecodePlan (a work list in tables of a fixed size), for steps of one query
        row per sequence. A kind is the number of query heads per kv head and the window; keys of the result name it.
        scratch: `AttentionMeta.scratch` after a step of all kinds. most_items, most_sequences: most ranges of keys and
        sequences of a step."""
        return {
            key: DecodePlan(kind=launches[0].kind, most_items=most_items, most_sequences=most_sequences)
            for key, launches in scratch.items()
            if key.startswith("triton/")
        }

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend as `AttentionBackend.forward` demands. q, k and v have the same dtype and dense heads; pages may have
        any strides. Raises AttentionUnsupported for a selection."""
        if params.selection is not None:
            raise AttentionUnsupported("these kernels attend to whole contexts")
        _, heads, k_dim = q.shape
        kv_heads, v_dim = kv.v.shape[2:]
        group = heads // kv_heads
        by_torch: list[int] = []
        if self._prompts is not None and self._prompts.takes(q, kv, params):
            by_torch = self._long(meta, group)
        key = f"triton/{group}/{params.window}" + ("/rest" if by_torch else "")
        launches = meta.scratch.get(key)
        if launches is None:
            launches = meta.scratch[key] = _plan(meta, group, params.window, q.device, by_torch)

        out = q.new_empty(q.shape[0], heads, v_dim)
        for sequence in by_torch:
            assert self._prompts is not None
            self._prompts.forward(q, kv, meta, params, sequence, out)
        k_padded = max(16, triton.next_power_of_2(k_dim))
        v_padded = max(16, triton.next_power_of_2(v_dim))
        # small enough that two tiles of keys and values fit the shared memory of small devices
        tile = min(64, max(16, 16384 // (max(k_padded, v_padded) * q.element_size())))
        sinks = params.sinks if params.sinks is not None else q  # a placeholder that is not read if there are no sinks
        for launch in launches:
            parts_shape = (launch.parts, kv_heads, launch.rows)
            part_mixed = torch.empty((*parts_shape, v_padded), dtype=torch.float32, device=q.device)
            part_stats = torch.empty((*parts_shape, 2), dtype=torch.float32, device=q.device)
            _attend[(len(launch.items), kv_heads)](
                q,
                kv.k,
                kv.v,
                meta.block_table,
                launch.items,
                sinks,
                out,
                part_mixed,
                part_stats,
                params.scale,
                params.softcap or 1.0,
                meta.block_table.stride(0),
                q.stride(0),
                q.stride(1),
                *kv.k.stride()[:3],
                *kv.v.stride()[:3],
                out.stride(0),
                out.stride(1),
                params.window or 0,
                group=group,
                rows=launch.rows,
                tile=tile,
                page_size=kv.k.shape[1],
                k_dim=k_dim,
                v_dim=v_dim,
                k_padded=k_padded,
                v_padded=v_padded,
                has_window=params.window is not None,
                has_softcap=params.softcap is not None,
                has_sink=params.sinks is not None,
                precision="ieee" if q.dtype == torch.float32 else "tf32",
                widen=self._interpreted and q.dtype == torch.bfloat16,
                num_warps=_warps(launch.rows, v_padded),
            )
            if launch.parts:
                _merge[(len(launch.merges), kv_heads)](
                    launch.merges,
                    sinks,
                    out,
                    part_mixed,
                    part_stats,
                    out.stride(0),
                    out.stride(1),
                    group=group,
                    rows=launch.rows,
                    v_dim=v_dim,
                    v_padded=v_padded,
                    has_sink=params.sinks is not None,
                )
        return out


def _plan(
    meta: AttentionMeta, group: int, window: int | None, device: torch.device, without: Sequence[int]
) -> list[_Launch]:
    """Make the work list of one step: one grid of small blocks for decoding sequences, another for prefilling ones.
    group: query heads per kv head. window: keys that a query sees; None: all. without: sequences that another kernel
    computes."""
    query_lens = np.array(meta.query_lens, dtype=np.int64)
    context_lens = np.array(meta.context_lens, dtype=np.int64)
    decode_rows = _decode_rows(group)
    decoding = (query_lens > 0) & (query_lens * group <= decode_rows)
    prefilling = (query_lens > 0) & ~decoding
    prefilling[list(without)] = False
    launches = []
    for chosen, rows, split in (
        (decoding, decode_rows, _SPLIT),
        (prefilling, max(_PREFILL_ROWS, decode_rows), None),
    ):
        if chosen.any():
            work = _work(query_lens, context_lens, chosen.nonzero()[0], group, window, rows, split)
            items, merges = (torch.from_numpy(table).to(device) for table in (work.items, work.merges))
            launches.append(_Launch((group, window), rows, items, merges, work.parts))
    return launches


def _decode_rows(group: int) -> int:
    return max(_DECODE_ROWS, int(triton.next_power_of_2(group)))


@dataclass(frozen=True, slots=True)
class _Work:
    """The work list of a `_Launch`, items and merges, on the host."""

    items: NDArray[np.int32]
    merges: NDArray[np.int32]
    parts: int


def _work(
    query_lens: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    sequences: NDArray[np.int64],
    group: int,
    window: int | None,
    rows: int,
    split: int | None,
) -> _Work:
    """Cut the queries of some sequences into blocks of at most `rows`, and their keys into ranges of `split`; None: do
    not cut the keys. sequences: indices into query_lens and context_lens."""
    step = rows // group
    blocks = -(-query_lens[sequences] // step)
    sequence = np.repeat(sequences, blocks)
    offset = _counting(blocks) * step
    first_token = (np.cumsum(query_lens) - query_lens)[sequence] + offset
    position = (context_lens - query_lens)[sequence] + offset
    tokens = np.minimum(query_lens[sequence] - offset, step)
    end = position + tokens
    begin = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0) // _ALIGN * _ALIGN

    ranges = np.ones_like(end) if split is None else -(-(end - begin) // split)
    block = np.repeat(np.arange(len(ranges)), ranges)
    range_begin = begin[block] + _counting(ranges) * (split or 0)
    range_end = end[block] if split is None else np.minimum(range_begin + split, end[block])
    divided = ranges > 1
    is_part = divided[block]
    part = np.where(is_part, np.cumsum(is_part) - 1, -1)
    items = np.stack(
        (sequence[block], first_token[block], position[block], tokens[block], range_begin, range_end, part), axis=1
    )
    parts = np.where(divided, ranges, 0)
    merges = np.stack((first_token, tokens, np.cumsum(parts) - parts, parts), axis=1)[divided]
    return _Work(items.astype(np.int32), merges.astype(np.int32), int(parts.sum()))


class DecodePlan:
    """The work list of steps in which every sequence has one query row, for one kind of layers (group of query heads,
    window). The list is kept in tables of a fixed size: a CUDA graph is captured with them, and they are filled anew
    before every replay. Unused entries of a table do nothing."""

    def __init__(self, *, kind: tuple[int, int | None], most_items: int, most_sequences: int) -> None:
        """Allocate the tables. most_items: most ranges of keys, from `TritonPagedAttention.num_items`."""
        self._group, self._window = kind
        self._items, self._merges = _pinned(most_items, 7), _pinned(most_sequences, 4)

    def launch(self, device: torch.device) -> list[_Launch]:
        """Return the device tables from which the kernels read their work list, still empty. `fill` copies the list to
        them."""
        items, merges = (torch.zeros_like(table, device=device) for table in (self._items, self._merges))
        items[:, 6] = -1  # a part would be written
        kind = self._group, self._window
        return [_Launch(kind, _decode_rows(self._group), items, merges, self._items.shape[0])]

    def fill(self, launches: Sequence[_Launch], context_lens: Sequence[int]) -> None:
        """Write the work list of a step to the tables. context_lens: its contexts' lengths. The previous step must have
        ended, because its tables are overwritten."""
        lens = np.array(context_lens, dtype=np.int64)
        rows = _decode_rows(self._group)
        work = _work(np.ones_like(lens), lens, np.arange(len(lens)), self._group, self._window, rows, _SPLIT)
        for host, device, table in (
            (self._items, launches[0].items, work.items),
            (self._merges, launches[0].merges, work.merges),
        ):
            array = host.numpy()
            array[: len(table)] = table
            array[len(table) :] = 0
            if host is self._items:
                array[len(table) :, 6] = -1
            device.copy_(host, non_blocking=True)


def _pinned(rows: int, width: int) -> Tensor:
    return torch.zeros(rows, width, dtype=torch.int32, pin_memory=torch.cuda.is_available())


def _counting(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate 0 .. count - 1 for each of `counts`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
