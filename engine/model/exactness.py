"""Proves at load that a row's result depends on its own tokens alone, bit for bit.

One text is computed at once, in chunks of every size that serving uses, and token by token next to other sequences. If
keys, values and logits agree in every bit, then a returning conversation and its recomputation give the same text. The
proof runs the loaded model in its own shapes, with the threads that will serve it, so any kernel that is chosen by the
number of rows shows up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.pages import spoil

ROWS = (1, 2, 8, 9, 41, 300)  # one stream, few rows, the last and first counts of a kernel, a short turn, a long prompt
_LEAST_ROWS = 32
TOKENS = 4 * ROWS[-1]  # approximate number of tokens that the proof computes


@dataclass(frozen=True, slots=True)
class Exactness:
    """The result of the proof that a row's result depends on its own tokens alone."""

    proven: bool
    detail: str  # text for people


class Proof:
    """A proof that in one engine a row's result depends on its own tokens alone, made once at the start. It overwrites
    pages from 0 on, which must not be in use."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        num_pages: int,
        page_size: int,
        max_context: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._runner, self._page_size, self._device = runner, page_size, device
        last = min(ROWS[-1], max_context - 1, (num_pages // 2 - 1) * page_size)
        self._counts = [*(rows for rows in ROWS[:-1] if rows < last), last]
        generator = torch.Generator().manual_seed(0)
        last = max(0, last)
        self._ids = torch.randint(0, vocab_size, (2, last), generator=generator).tolist()
        half = -(-last // page_size)
        # in reverse, so that the pages of a context are not adjacent
        self._pages, self._others = list(range(half))[::-1], list(range(half, num_pages))[: half + 1]

    def run(self) -> Exactness:
        last = self._counts[-1]
        if last < _LEAST_ROWS:
            return Exactness(False, "not tried, HBM or the window is too small for the proof")
        rows, logits = self._compute([(last, 0)], all_logits=True)
        few = [count for count in self._counts[:-1] if count < last // 2]
        while sum(few) >= last:
            few.pop()
        # Chunk sizes increasing and decreasing, and single rows in batches of each size.
        single = [(1, count - 1) for count in self._counts]
        cases = {
            "in short chunks": [(count, 0) for count in (*few, last - sum(few))],
            "in long chunks": [(count, 0) for count in (last - sum(few), *few[::-1])],
            "beside other sequences": [(last - len(single), 1), *single],
        }
        for name, steps in cases.items():
            again, some = self._compute(steps, all_logits=False)
            ends = torch.tensor([count for count, _ in steps]).cumsum(0) - 1
            if not all(torch.equal(x, y) for x, y in zip(rows, again, strict=True)):
                return Exactness(False, f"keys and values differ in their last bits when a text is computed {name}")
            if not torch.equal(logits[ends], some):
                return Exactness(False, f"logits differ in their last bits when a text is computed {name}")
        return Exactness(True, f"the same bits for {', '.join(map(str, self._counts))} rows at once, in any chunks")

    def _compute(self, steps: list[tuple[int, int]], *, all_logits: bool) -> tuple[list[Tensor], Tensor]:
        """Return the text's keys and values, layer by layer, and the logits of all rows or of the last row of each
        step. steps: for each step, (number of rows of the text, number of rows of other sequences in the batch)."""
        for layer in self._runner.pages:
            spoil(layer, self._pages)
        tables = BlockTables(max_seqs=3, max_pages=len(self._others))
        done, logits = 0, []
        for count, beside in steps:
            prompt_rows = count - 1 if all_logits else 0
            items = [BatchItem("text", self._ids[0][done : done + count], done, self._pages, True, prompt_rows)]
            # Other sequences come before the text in the batch: one of many rows and, if there are several rows, one of
            # a single row on its own page.
            for name, rows, pages in (("long", beside - 1, self._others[:-1]), ("short", 1, self._others[-1:])):
                if beside and rows:
                    items.insert(0, BatchItem(name, self._ids[1][:rows], 0, pages, False))
            batch = build_batch(items, tables, self._page_size, self._device)
            logits.append(self._runner.forward(batch, None))
            done += count
        taken = []
        for layer in self._runner.pages:
            taken += [x[self._pages].flatten(0, 1)[:done].clone() for x in (layer.k, layer.v)]
        return taken, torch.cat(logits)
