"""Attends over contexts that HBM cannot hold. Parked blocks, which lie only in DRAM, are copied piece by piece to a few
pages of HBM, the ring (docs/decisions/0024-parked-blocks.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.rows import PARKED
from reprise.cache.moves import BlockLoad
from reprise.cache.requests.context import RequestContext
from reprise.cache.transfer.slot_reader import SlotReader
from reprise.cache.transfer.transfer import Transfer
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from reprise.kernels.attention.running_softmax import RunningSoftmax
from reprise.kernels.kv_copy import gather_rows


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a context whose rows are in HBM at the same time."""

    first: int  # lowest row of the context in this piece
    last: int
    rows: Tensor  # [n] int64: which of the context's rows they are
    slots: Tensor  # [n] int64: where in HBM they are, once they have been brought
    reader: SlotReader | None  # brings them; None: they are there


@dataclass(frozen=True, slots=True)
class _Reading:
    """A sequence of the step that has parked blocks."""

    request_id: str
    pieces: list[_Piece]


@dataclass(frozen=True, slots=True)
class _Split:
    """A batch, split into sequences with parked blocks and sequences without."""

    parked: list[tuple[int, int, int, _Reading]]  # first and last query row + 1, first of them in its context
    others: AttentionMeta | None  # None: there are none
    other_tokens: Tensor  # [tokens] int64: their query rows


class ParkedAttention:
    """An attention for steps with parked blocks: blocks of a context larger than HBM that lie only in DRAM. It copies
    some of them at a time into a few HBM pages (the ring), and merges the attention to each portion. Implements
    `reprise.engine.step.ports.ParkedReader`; used by the engine's thread."""

    page_multiple = 1

    def __init__(
        self, *, inner: AttentionBackend, pages: Sequence[KvPages], ring: Sequence[int], transfer: Transfer
    ) -> None:
        """Set up. inner: the usual attention backend. pages: the whole KV pool, by layer. ring: numbers of the pages
        that belong to no context and receive parked blocks. transfer: reads blocks from DRAM."""
        self.name = inner.name
        self._inner, self._ring, self._transfer = inner, ring, transfer
        self._page_size, self._device = pages[0].k.shape[1], pages[0].k.device
        self._layers = {id(layer): number for number, layer in enumerate(pages)}
        self._reading_of: dict[int, _Reading] = {}  # reading of each query row, by its slot
        self._lost: dict[str, dict[BlockKey, None]] = {}

    def begin(self, meta: AttentionMeta, contexts: Sequence[RequestContext]) -> bool:
        self._reading_of, self._lost = {}, {}
        parked = {place: context for place, context in enumerate(contexts) if _has_parked(context)}
        bounds = meta.query_start.tolist() if parked else []
        for sequence, context in parked.items():
            pieces = [*self._pieces_below(context), *self._pieces_here(context, meta.context_lens[sequence])]
            reading = _Reading(context.request_id, pieces)
            for slot in meta.slots[bounds[sequence] : bounds[sequence + 1]].tolist():
                self._reading_of[slot] = reading
        return bool(parked)

    def take_lost(self) -> dict[str, list[BlockKey]]:
        lost, self._lost, self._reading_of = self._lost, {}, {}
        return {request_id: list(keys) for request_id, keys in lost.items()}

    def _pieces_below(self, context: RequestContext) -> Iterator[_Piece]:
        """Yield the parked blocks of a context in pieces as large as the ring (the pages that parked blocks are copied
        to)."""
        per_page = self._page_size // BLOCK_TOKENS
        parked = [
            block
            for index, page in enumerate(context.rows.pages)
            if page == PARKED
            for block in range(index * per_page, (index + 1) * per_page)
        ]
        most = len(self._ring) * per_page
        for start in range(0, len(parked), most):
            blocks = parked[start : start + most]
            places = [divmod(number, per_page) for number in range(len(blocks))]
            loads = [
                BlockLoad(
                    context.saving.parked[block].key,
                    BLOCK_TOKENS,
                    context.saving.parked[block].slot,
                    None,
                    self._ring[page],
                    place * BLOCK_TOKENS,
                    context.saving.parked[block].position,
                )
                for block, (page, place) in zip(blocks, places, strict=True)
            ]
            firsts = [load.page * self._page_size + load.page_row for load in loads]
            reader = self._transfer.reader_of(loads)
            yield self._piece([block * BLOCK_TOKENS for block in blocks], firsts, BLOCK_TOKENS, None, reader)

    def _pieces_here(self, context: RequestContext, num_rows: int) -> Iterator[_Piece]:
        """Yield those rows of a context that lie in HBM, in pieces as large as the ring (the pages through which parked
        blocks are read). So attending to them needs no more memory than attending to parked blocks."""
        size, used = self._page_size, -(-num_rows // self._page_size)
        here = [index for index, page in enumerate(context.rows.pages[:used]) if page != PARKED]
        for start in range(0, len(here), len(self._ring)):
            indices = here[start : start + len(self._ring)]
            firsts = [context.rows.pages[index] * size for index in indices]
            yield self._piece([index * size for index in indices], firsts, size, num_rows, None)

    def _piece(
        self, rows: list[int], slots: list[int], count: int, num_rows: int | None, reader: SlotReader | None
    ) -> _Piece:
        """Make a piece, a part of a context whose rows lie in HBM at the same time, from runs of `count` adjacent rows.
        rows, slots: the first row of each run, in the context and in HBM. num_rows: length of the context, if it may
        end within the last run. reader: copies the rows to these slots; None: they are there already."""
        within = np.arange(count)
        found = (np.array(rows)[:, None] + within).reshape(-1)
        places = (np.array(slots)[:, None] + within).reshape(-1)
        if num_rows is not None:
            found, places = found[found < num_rows], places[found < num_rows]
        both = (torch.from_numpy(numbers).to(self._device) for numbers in (found, places))
        return _Piece(int(found[0]), int(found[-1]), next(both), next(both), reader)

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend as `AttentionBackend.forward` demands. The batch may be any part of the one given to `begin`. All rows
        are read, whatever the selection in `params` is."""
        params, layer = replace(params, selection=None), self._layers[id(kv)]
        split: _Split | None = meta.scratch.get("parked")
        if split is None:
            split = meta.scratch["parked"] = self._split(meta)
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_dim)
        if split.others is not None:
            out[split.other_tokens] = self._inner.forward(q[split.other_tokens], kv, split.others, params)
        for start, stop, first, reading in split.parked:
            out[start:stop] = self._attend(q[start:stop], first, kv, layer, params, reading).to(q.dtype)
        return out

    def _attend(
        self, q: Tensor, first: int, kv: KvPages, layer: int, params: AttentionParams, reading: _Reading
    ) -> Tensor:
        softmax = RunningSoftmax(q, first, params, kv.v_dim)
        for piece in reading.pieces:
            if not softmax.sees(piece.first, piece.last):
                continue
            if piece.reader is not None and (lost := piece.reader.bring(layer)):
                self._lost.setdefault(reading.request_id, {}).update(dict.fromkeys(lost))
                continue  # go on, because others of the batch need this step
            keys, values = (kv.to_numbers(gather_rows(pool, piece.slots)) for pool in (kv.k, kv.v))
            softmax.add(piece.rows, keys, values)
        return softmax.result()

    def _split(self, meta: AttentionMeta) -> _Split:
        bounds = meta.query_start.tolist()
        # The last row of a sequence that has rows in the batch says whose it is.
        slots = meta.slots.tolist()
        readings = [self._reading_of.get(slots[stop - 1]) for stop in bounds[1:]]
        parked = [
            (bounds[i], bounds[i + 1], meta.context_lens[i] - meta.query_lens[i], reading)
            for i, reading in enumerate(readings)
            if reading is not None
        ]
        left = [i for i, reading in enumerate(readings) if reading is None]
        tokens = [token for i in left for token in range(bounds[i], bounds[i + 1])]
        other_tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        return _Split(parked, _part(meta, left, other_tokens) if left else None, other_tokens)


def _has_parked(context: RequestContext) -> bool:
    return bool(context.saving.parked) and PARKED in context.rows.pages


def _part(meta: AttentionMeta, sequences: list[int], tokens: Tensor) -> AttentionMeta:
    """Return the metadata of some sequences of a batch. tokens: indices of their query rows."""
    query_lens = [meta.query_lens[i] for i in sequences]
    device = meta.context_len.device
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    chosen = torch.tensor(sequences, dtype=torch.int64, device=device)
    return AttentionMeta(
        query_lens=query_lens,
        context_lens=[meta.context_lens[i] for i in sequences],
        query_start=torch.from_numpy(starts).to(device),
        context_len=meta.context_len[chosen],
        block_table=meta.block_table[chosen],
        slots=meta.slots[tokens],
    )
