"""Copies rows of steps into DRAM slots."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reprise.cache.storage.slab import Slab
from reprise.cache.transfer.capture import CapturedRows
from reprise.kernels.row_copies import copy_into_blocks


def place_rows(slab: Slab, captures: Sequence[CapturedRows], layers: Sequence[int]) -> None:
    """Copy the KV rows that some steps have computed (`captures`) into their DRAM slots, for these layers only. The
    copy is complete on return, or on CUDA when the current stream is done; that stream must wait for the steps' stream.
    Every step must have captured exactly these layers. Called by the saving thread, or on CPU in bf16 by the
    engine's."""
    targets = slab.parts(layers)
    sources: list[Sequence[Tensor]] = [capture.step.parts for capture in captures]
    pieces = [
        (step, piece.batch_row, piece.slot, piece.slot_row, piece.num_rows)
        for step, capture in enumerate(captures)
        for piece in capture.pieces
    ]
    table, device = np.array(pieces), sources[0][0].device
    if device.type == "cuda":
        if copy_into_blocks(targets, sources, table):
            return
        sources = [on_host(parts) for parts in sources]
    if not copy_into_blocks(targets, sources, table):
        _place_by_index(targets, sources, captures)


def on_host(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return rows in memory that CPU kernels can read: the rows themselves, or copies of CUDA's, which are complete on
    return. The copies are made together, in page-locked memory, as fast as the link is."""
    if not parts[0].is_cuda:
        return parts
    memories: dict[int, Tensor] = {}  # what parts share is copied once
    copies = []
    for part in parts:
        storage = part.untyped_storage()
        memory = memories.get(storage.data_ptr())
        if memory is None:
            whole = torch.empty(0, dtype=part.dtype, device=part.device).set_(storage)
            memory = torch.empty(whole.shape, dtype=part.dtype, pin_memory=True)
            memories[storage.data_ptr()] = memory.copy_(whole, non_blocking=True)
        copies.append(memory.as_strided(part.size(), part.stride(), part.storage_offset()))
    torch.cuda.current_stream(parts[0].device).synchronize()
    return copies


def _place_by_index(
    targets: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], captures: Sequence[CapturedRows]
) -> None:
    pieces = [piece for capture in captures for piece in capture.pieces]
    slots = torch.cat([torch.full((p.num_rows,), p.slot) for p in pieces])
    places = torch.cat([torch.arange(p.slot_row, p.slot_row + p.num_rows) for p in pieces])
    wanted = [_wanted_rows(capture) for capture in captures]
    for number, target in enumerate(targets):
        parts = [step[number] for step in sources]
        chosen = [t if rows is None else t.index_select(0, rows) for t, rows in zip(parts, wanted, strict=True)]
        source = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        into, taken = as_words(target), as_words(source)
        if into.dtype != taken.dtype:  # the memory of one of them does not allow it
            into, taken = target, source
        into.index_put_((slots, places), taken)


def _wanted_rows(capture: CapturedRows) -> Tensor | None:
    """Return the indices of a step's rows that are to be saved, in the order of the pieces; None for all of them as
    they lie in the batch. The accepted rows of drafts come after all others: as many rows can be in another order."""
    rows = torch.cat([torch.arange(p.batch_row, p.batch_row + p.num_rows) for p in capture.pieces])
    return None if torch.equal(rows, torch.arange(capture.step.num_rows)) else rows


def as_words(rows: Tensor) -> Tensor:
    """View the same memory in elements of eight bytes if possible, because copying by index takes time per element."""
    per_word = 8 // rows.element_size()
    strides = (*rows.stride()[:-1], rows.storage_offset())
    if rows.stride(-1) != 1 or rows.shape[-1] % per_word or any(stride % per_word for stride in strides):
        return rows
    return rows.view(torch.int64)
