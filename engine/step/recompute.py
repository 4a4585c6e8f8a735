"""Computes a text anew, in pages of HBM that are borrowed for it, while requests run."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from reprise.cache.manager import CacheManager
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integer types by their bytes


class Recompute:
    """A runner that computes texts again, for the `Verifier`, in the engine's loop: all sequences that decode wait for
    it. The computed rows are neither saved below HBM nor made available to requests."""

    def __init__(
        self, *, runner: ModelRunner, cache: CacheManager, page_size: int, device: torch.device, chunk_tokens: int
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._runner, self._cache = runner, cache
        self._page_size, self._device = page_size, device

    @contextlib.contextmanager
    def borrowed(self, num_tokens: int) -> Iterator[list[int] | None]:
        """Lend pages with room for `num_tokens` tokens until the end of the `with` block; yields None if HBM has no
        room."""
        pages = self._cache.borrow(-(-num_tokens // self._page_size))
        try:
            yield pages
        finally:
            if pages is not None:
                self._cache.give_back(pages)

    def run(self, token_ids: Sequence[int], pages: list[int], *, first: int = 0, rows: int = 1) -> Tensor:
        """Compute the tokens of a text from index `first` on, after those whose KV the pages hold already. Returns the
        logits of the last `rows` tokens [rows, vocab], which are computed together; rows is at most `chunk_tokens`."""
        end = len(token_ids)
        cut = end if rows == 1 else end - rows
        starts = [*range(first, cut, self.chunk_tokens), *([cut] if cut < end else [])]
        tables, logits = BlockTables(max_seqs=1, max_pages=len(pages)), None
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            chunk = list(token_ids[start:stop])
            wanted = rows - 1 if stop == end else 0
            item = BatchItem("recompute", chunk, start, pages, wants_logits=True, prompt_rows=wanted)
            logits = self._runner.forward(build_batch([item], tables, self._page_size, self._device), None)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def copy(self, pages: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages to equally many others (`target`), in all layers."""
        source, into = (torch.tensor(list(numbers), device=self._device) for numbers in (pages, target))
        for layer in self._runner.pages:
            layer.k[into] = layer.k[source]
            layer.v[into] = layer.v[source]

    @torch.inference_mode()
    def nudge(self, pages: Sequence[int]) -> None:
        """Flip the last bit of every number in these pages, a change as small as rounding."""
        into = torch.tensor(list(pages), device=self._device)
        for layer in self._runner.pages:
            for rows in (layer.k[..., : layer.k_dim], layer.v[..., : layer.v_dim]):
                rows[into] = (rows[into].view(_INTEGERS[rows.dtype.itemsize]) ^ 1).view(rows.dtype)
