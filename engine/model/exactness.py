"""What was proven at load: that a row's result depends on nothing but its own tokens, bit for bit.

One text is computed at once, cut into chunks of as many rows as serving may cut it into, and token by token beside
other sequences. If keys, values and logits agree in every bit, then so do the text of a returning conversation and that
of a recompute. The loaded model is run on its own shapes, with the threads that it will be served with: what picks a
kernel by the number of rows shows here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.batch import BatchItem, BlockTables, build_batch
from engine.model.runner import ModelRunner

ROWS = (1, 2, 8, 9, 41, 300)  # one decoder, few, the last and first of a kernel's kind, a short turn, a long prompt
_LEAST_ROWS = 32
TOKENS = 4 * ROWS[-1]  # that the proof computes, about


@dataclass(frozen=True, slots=True)
class Exactness:
    """What is known of a loaded model."""

    proven: bool
    detail: str  # for people


class Proof:
    """Writes to pages from 0 on, which nobody may own yet."""

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
        # Backwards, so that pages of a context do not lie in a row.
        self._pages, self._others = list(range(half))[::-1], list(range(half, num_pages))[: half + 1]

    def run(self) -> Exactness:
        last = self._counts[-1]
        if last < _LEAST_ROWS:
            return Exactness(False, "not tried, HBM or the window is too small for the proof")
        rows, logits = self._compute([(last, 0)], all_logits=True)
        few = [count for count in self._counts[:-1] if count < last // 2]
        while sum(few) >= last:
            few.pop()
        # Row counts from few to many and from many to few, and single rows in batches of each size.
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
        """Keys and values of the text, layer by layer, and logits: of all rows or of the last one of each step.
        steps: rows of the text, and rows of others beside them."""
        for layer in self._runner.pages:
            layer.k[self._pages] = layer.v[self._pages] = float("nan")  # whatever reads ahead shall show
        tables = BlockTables(max_seqs=3, max_pages=len(self._others))
        done, logits = 0, []
        for count, beside in steps:
            prompt_rows = count - 1 if all_logits else 0
            items = [BatchItem("text", self._ids[0][done : done + count], done, self._pages, True, prompt_rows)]
            # The others stand ahead of it: one of many rows and, of several, one of a single row on a page of its own.
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
