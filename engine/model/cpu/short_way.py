"""Computes a whole model for a few rows without transformers' own code.

That code calls the same modules, but what it does around them (masks it does not need, outputs it might capture) takes
half a millisecond of a step, which is a tenth of a step of a small model with packed weights. The short way is used
where both give the same logits, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor, nn

from reprise.engine.model.cpu.few_rows import FewRows, Layers
from reprise.engine.model.cpu.modules import RmsNorm
from reprise.engine.model.hf_model import Step, forward
from reprise.engine.model.loading import rope_limit
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import ProbeResult, RopeSource, single_sequence_meta
from reprise.kernels.attention.ragged_batch import AttentionBackend, PageFormat

_CHECK_TOKENS = 5
_CHECK_POSITION = 300  # position of the first row, at which rotations show
_KNOWN_POSITIONS = 8192  # positions whose rotations are kept: 2 MiB with heads of 64
_CHECK_POSITIONS = (*range(40), 1000, 4097, 8190, 8191)


class ShortWay:
    """A forward pass of one model without transformers' code around the layers, for steps of at most FEW_ROWS rows.
    Called in a step, by the thread that runs the model."""

    def __init__(self, *, embedding: nn.Module, rope: RopeSource, first: FewRows, norm: nn.Module, head: nn.Module):
        self._embedding, self._rope, self._first, self._norm, self._head = embedding, rope, first, norm, head
        self._run = first.run  # run of all layers
        self._known: tuple[Tensor, Tensor] | None = None  # rotary tables of the first positions

    def logits(self, step: Step, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor | None:
        """Return logits [rows, vocab], or None if this step cannot be computed without transformers' code: it has too
        many rows, or another part must act between layers. Arguments are those of `hf_model.forward`."""
        first = self._first
        if first.run is not self._run or not first.is_undisturbed(step) or not first.takes_rows(step, len(token_ids)):
            return None
        hidden: Tensor = self._embedding(token_ids)
        cos, sin = self._tables(hidden, positions)
        hidden = first(hidden, cos, sin)
        if len(logit_rows) < len(hidden):
            hidden = hidden[logit_rows]
        logits: Tensor = self._head(self._norm(hidden))
        return logits

    def _tables(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, rows, dim], looked up where possible, because computing them takes as long as four
        layers."""
        if self._known is None or int(positions.max()) >= _KNOWN_POSITIONS:
            return self._rope.tables(hidden, positions)
        return self._known[0][:, positions], self._known[1][:, positions]

    def remember_tables(self, dtype: torch.dtype) -> None:
        """Compute the rotary tables (cos and sin) of the first positions, all at once. Keep them if they have the same
        bits as tables that are computed for one position at a time."""
        like, every = torch.zeros(1, dtype=dtype), torch.arange(_KNOWN_POSITIONS)
        known = self._rope.tables(like, every)
        single = [self._rope.tables(like, every[place : place + 1]) for place in _CHECK_POSITIONS]
        same = all(
            torch.equal(table[:, place : place + 1], one)
            for place, tables in zip(_CHECK_POSITIONS, single, strict=True)
            for table, one in zip(known, tables, strict=True)
        )
        self._known = known if same else None


def find_short_way(
    model: nn.Module, probed: ProbeResult, backend: AttentionBackend, page_format: PageFormat
) -> ShortWay | None:
    """Return a ShortWay for a model in bf16, whose few-row steps then run without transformers' code. None if the model
    is built otherwise, or if a trial gives other logits than the model's own code."""
    decoder, rope = getattr(model, "model", None), probed.ropes[0]
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if not (isinstance(layers, Layers) and isinstance(norm, RmsNorm) and rope is not None and head is not None):
        return None
    ways: list[Any] = [getattr(layer, "few", None) for layer in layers]
    if any(way is None or way.run is not ways[0].run for way in ways):
        return None
    way = ShortWay(embedding=embedding, rope=rope, first=ways[0], norm=norm, head=head)
    if rope_limit(model.config.get_text_config()) is None:  # type: ignore[operator,union-attr]
        way.remember_tables(torch.bfloat16)
    positions = torch.arange(_CHECK_TOKENS) + _CHECK_POSITION
    tokens, wanted = torch.arange(_CHECK_TOKENS), torch.tensor([1, _CHECK_TOKENS - 1])
    page = backend.page_multiple
    logits = []
    for takes_short_way in (True, False):
        pages = blank_pages(probed.shapes, 1, page, page_format)
        step = Step(single_sequence_meta(wanted.device, 0, _CHECK_TOKENS, page), pages.__getitem__, backend, None)
        logits.append(forward(model, step, tokens, positions, wanted, way if takes_short_way else None))
    return way if torch.equal(logits[0], logits[1]) else None
