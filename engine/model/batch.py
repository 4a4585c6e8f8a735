"""Turns the chunks of a step into flat tensors, with block tables (each sequence's page numbers) that persist between
steps."""

from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np
import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import AttentionMeta


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a step: `token_ids`, to be computed as the rows from `first_row` on of the sequence's
    context."""

    request_id: str
    token_ids: list[int]
    first_row: int
    pages: list[int]  # pages of the whole context; only grows while the sequence runs
    wants_logits: bool  # whether the logits of its last row are wanted
    prompt_rows: int = 0  # number of leading rows whose logits are wanted too, for the prompt's logprobs
    draft_rows: int = 0  # number of last rows that a draft has; then the logits of all rows are wanted
    partial: bool = False  # whether its row, if it is a single one, may attend to a part of the context


@dataclass(frozen=True, slots=True)
class BatchInput:
    """The tensors of one step, in which the rows of all sequences follow each other."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    logit_rows: Tensor  # [rows whose logits are wanted, in order of items] int64, indices into the batch
    meta: AttentionMeta

    def to(self, device: torch.device) -> "BatchInput":
        """Return the input with its tensors on a device: itself if they are there already."""
        if self.token_ids.device == device:
            return self
        meta = self.meta
        return BatchInput(
            token_ids=self.token_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            logit_rows=self.logit_rows.to(device, non_blocking=True),
            meta=replace(
                meta,
                query_start=meta.query_start.to(device, non_blocking=True),
                context_len=meta.context_len.to(device, non_blocking=True),
                block_table=meta.block_table.to(device, non_blocking=True),
                slots=meta.slots.to(device, non_blocking=True),
            ),
        )


class BlockTables:
    """A table of page numbers, with one row for each running sequence. Rows are extended in place: converting lists of
    pages to a tensor in every step took more than half of the scheduling time. Used by the thread that runs the
    model."""

    _numbers = count()  # shared by all tables, since a selector outlives a table and must not confuse numbers

    def __init__(self, *, max_seqs: int, max_pages: int) -> None:
        self._table = np.zeros((max_seqs, max_pages), dtype=np.int32)
        self._rows: dict[str, int] = {}
        self._lengths = [0] * max_seqs
        self._free = list(range(max_seqs))
        self._owners: dict[str, int] = {}

    def row(self, request_id: str, pages: list[int]) -> int:
        """Return the index of a sequence's row of the table, after adding its new pages. pages: all pages of the
        sequence so far."""
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._free.pop()
            self._lengths[row] = 0
            self._owners[request_id] = next(self._numbers)
        known = self._lengths[row]
        if known < len(pages):
            self._table[row, known : len(pages)] = pages[known:]
            self._lengths[row] = len(pages)
        return row

    def drop(self, request_id: str) -> None:
        """Free the row of a sequence that was finished, aborted or preempted. An unknown id is ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            del self._owners[request_id]

    def owner(self, request_id: str) -> int:
        """Return a number that stands for the sequence's present use of its row of the table. When the sequence drops
        its row and takes one again, it gets another number. So a caller that has kept the number notices that the row
        has other pages now."""
        return self._owners[request_id]

    def select(self, rows: list[int], num_pages: int) -> np.ndarray:
        """Return a copy of the table rows with these indices, int32 [rows, num_pages]. Entries after a sequence's last
        page are arbitrary valid page numbers."""
        return self._table[rows, :num_pages]


def build_batch(items: list[BatchItem], tables: BlockTables, page_size: int, device: torch.device) -> BatchInput:
    """Build the flat input of a forward pass over the tokens of all items, on `device`. tables: gets the items' pages.
    Costs a few microseconds per item, plus numpy work on the tokens."""
    query_lens = [len(item.token_ids) for item in items]
    context_lens = [item.first_row + len(item.token_ids) for item in items]
    rows = [tables.row(item.request_id, item.pages) for item in items]
    table = tables.select(rows, max(-(-length // page_size) for length in context_lens))
    query_start = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    tokens = np.fromiter((t for item in items for t in item.token_ids), dtype=np.int64, count=int(query_start[-1]))
    owner = np.repeat(np.arange(len(items)), query_lens)
    first = np.array([item.first_row for item in items], dtype=np.int64)
    positions = np.arange(len(tokens)) - query_start[owner] + first[owner]
    slots = table[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size
    logit_rows = query_start[1:][[item.wants_logits for item in items]] - 1
    if any(item.prompt_rows or item.draft_rows for item in items):
        logit_rows = _with_leading_rows(items, query_start)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return BatchInput(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        logit_rows=tensor(logit_rows.astype(np.int64)),
        meta=AttentionMeta(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=tensor(query_start),
            context_len=tensor(np.array(context_lens, dtype=np.int32)),
            block_table=tensor(table),
            slots=tensor(slots),
            partial={place: tables.owner(item.request_id) for place, item in enumerate(items) if item.partial},
        ),
    )


def _with_leading_rows(items: list[BatchItem], query_start: np.ndarray) -> np.ndarray:
    wanted = []
    for item, (start, end) in zip(items, pairwise(query_start), strict=True):
        last = item.draft_rows + item.wants_logits
        wanted += [np.arange(start, start + item.prompt_rows), np.arange(end - last, end)]
    return np.concatenate(wanted)
