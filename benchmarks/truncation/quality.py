"""What a truncation does to the answers: one sequence on the engine's own path, its window filled, cut, and gone on
with, in the three ways of AttentionStore §4.3.7.

AS    kept keys, saved without position, are re-embedded at 0, 1, 2, ...; nothing is computed again.
TT    the kept text is computed again, from position 0.
NKVT  kept keys stay as they were rotated, and new tokens are numbered from the kept length.

AS is also tried with its two roundings: saved in bfloat16 ("AS bf16"), and un-rotated from bfloat16 pages in HBM as
often in a row as the cache does that ("AS hops").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import Range, plan_cut
from reprise.cache.tiers.hbm import MAX_HOPS
from reprise.engine.model.batch import BatchInput
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.loading import load_model
from reprise.engine.model.pages import make_pages
from reprise.engine.model.probe import probe, single_sequence_meta
from reprise.engine.model.rotations import ModelRotations
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import PageFormat
from reprise.kernels.kv_copy import write_rows

ARMS = ("AS", "AS bf16", "AS hops", "TT", "NKVT")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SavedKv:
    """One layer of a computed text. k_plain [tokens, kv_heads, k_dim] un-rotated, v [tokens, kv_heads, v_dim]."""

    k_plain: Tensor
    v: Tensor


class _Capture:
    """Keeps the KV of one text as it is computed."""

    def __init__(self) -> None:
        self.layers: dict[int, SavedKv] = {}

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        self.layers[layer] = SavedKv(k_plain.clone(), v.clone())


class Bench:
    """A model in float32 with pages for one sequence. Single-threaded; every call of `compute` begins at row 0 of the
    pages, every call of `go_on` after the rows that the last `compute` or `place` has left."""

    def __init__(self, model: Path, window: int, max_tokens: int) -> None:
        self.model: Any = load_model(model, torch.float32, CPU)
        backend = BACKENDS["torch_cpu"]()
        self._page_size = math.lcm(backend.page_multiple, BLOCK_TOKENS)
        probed = probe(self.model, backend, self._page_size)
        if not probed.decouplable:
            raise ValueError(f"{model}: positions cannot be decoupled from keys")
        num_pages = math.ceil(max_tokens / self._page_size)
        self.pages = make_pages(probed.shapes, num_pages, self._page_size, PageFormat(torch.float32), CPU)
        self.rotations = ModelRotations(ropes=probed.ropes)
        self._capture = _Capture()
        self._runner = ModelRunner(model=self.model, pages=self.pages, backend=backend, sink=self._capture)
        self.length = 0
        self.window = window  # of which a cut drops half

    def _run(self, token_ids: Sequence[int], logit_rows: Tensor) -> Tensor:
        rows = torch.arange(self.length, self.length + len(token_ids))
        meta = single_sequence_meta(CPU, self.length, len(token_ids), self._page_size)
        logits = self._runner.forward(BatchInput(torch.tensor(token_ids), rows, logit_rows, meta), None)
        self.length += len(token_ids)
        return logits

    def compute(self, token_ids: Sequence[int]) -> list[SavedKv]:
        """Fill the pages with a text from position 0; what would be saved of it, per layer."""
        self.length = 0
        self._run(token_ids, torch.zeros(1, dtype=torch.int64))
        return [self._capture.layers[layer] for layer in range(len(self.pages))]

    def go_on(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities [tokens, vocab] after each of these tokens."""
        return self._run(token_ids, torch.arange(len(token_ids))).float().log_softmax(-1)

    @torch.inference_mode()
    def place(self, arm: str, saved: Sequence[SavedKv], rows: Tensor) -> None:
        """Make rows [kept] int64 of a saved text the whole context, the way of `arm` (not TT)."""
        slots = torch.arange(len(rows))
        for layer, (pages, kv) in enumerate(zip(self.pages, saved, strict=True)):
            keys, values = kv.k_plain[rows], kv.v[rows]
            if arm == "NKVT":
                keys = self.rotations.rotate(layer, keys, rows)
            elif arm == "AS hops":
                keys, values = self._hop(layer, keys.bfloat16(), rows, slots), values.bfloat16()
            else:
                if arm == "AS bf16":
                    keys, values = keys.bfloat16(), values.bfloat16()
                keys = self.rotations.rotate(layer, keys.float(), slots)
            write_rows(pages.k, slots, keys.float())
            write_rows(pages.v, slots, values.float())
        self.length = len(rows)

    def _hop(self, layer: int, plain: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Keys [kept, ...] in bfloat16 that lay at `start`, turned from place to place down to `end`, never saved:
        every hop rounds twice."""
        places = [start + (end - start) * hop // MAX_HOPS for hop in range(MAX_HOPS + 1)]
        keys = self.rotations.rotate(layer, plain, places[0])
        for here, there in pairwise(places):
            keys = self.rotations.rotate(layer, self.rotations.unrotate(layer, keys, here), there)
        return keys


def kept_rows(window: int, length: int, reserve: int, keep_first: int) -> Tensor:
    """Which rows of a context of `length` tokens a server with the default settings keeps, [kept] int64."""
    cuts = plan_cut(
        length, window=window, ratio=0.5, reserve=reserve, keep_first=keep_first, newest=length, starts=(), marked=()
    )
    return rows_without(length, cuts)


def rows_without(length: int, cuts: Sequence[Range]) -> Tensor:
    keep = torch.ones(length, dtype=torch.bool)
    for start, end in cuts:
        keep[start:end] = False
    return keep.nonzero()[:, 0]
