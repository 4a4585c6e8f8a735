"""Runs the first steps of an engine, before any request. They choose kernels and show how long steps take."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from reprise.engine.model.batch import BatchInput, BatchItem, BlockTables, build_batch
from reprise.engine.model.graph_runner import GraphRunner
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.loading import ModelRefused
from reprise.kernels.device_errors import lacks_memory

_CUDA_ROWS, _CPU_ROWS = 2048, 128
_LEAST_TOKENS = 32
_EFFICIENT_SHARE = 2 / 3  # share of the best rate that counts as efficient
_FEW_AT_ONCE, _TRIED_TOKENS = 8, 29
_LONG_S = 0.5  # a step that takes longer is not repeated, and no larger one is tried: models of 20 GB start sooner


class WarmUp:
    """A runner of an engine's trial steps. It overwrites KV pages from page 0 on, which must not be in use. most_rows:
    the most rows (tokens) that the sequence of a trial step may have."""

    def __init__(self, *, runner: ModelRunner, most_rows: int, page_size: int, device: torch.device) -> None:
        self._runner, self._most_rows, self._page_size, self._device = runner, most_rows, page_size, device
        num_pages = -(-most_rows // page_size)
        self._tables = BlockTables(max_seqs=1, max_pages=num_pages)
        self._table = list(range(num_pages))

    def step_times(self) -> tuple[float, float]:
        """Return (seconds that a step takes whatever its size is, additional seconds per token)."""
        rows = self.run_once()
        many_s, one_s = self._least_seconds(0, rows), self._least_seconds(rows, 1)
        # At least a tenth counts as per token: a guess for devices on which many rows take no longer than one.
        per_token_s = max(many_s - one_s, 0.1 * many_s) / (rows - 1)
        return max(0.0, one_s - per_token_s), per_token_s

    def run_once(self) -> int:
        """Run each kind of step once, so that kernels are chosen and memory is touched. Returns the number of rows of
        the largest step."""
        rows = min(self._most_rows - 1, _CUDA_ROWS if self._device.type == "cuda" else _CPU_ROWS)
        few = min(rows, self._page_size - 1)
        self._seconds(0, few)  # says nothing of a step's time: kernels are compiled, and weights come from disk
        if self._seconds(0, few) > _LONG_S:
            rows = few
        else:
            self._seconds(0, rows)
        self._seconds(rows, 1)
        return rows

    def decode(self, most_sequences: int) -> None:
        """Record decode steps of up to `most_sequences` sequences as CUDA graphs, if the runner uses graphs."""
        if isinstance(self._runner, GraphRunner):
            self._runner.capture_all(most_sequences, self._decode_batch)

    def _decode_batch(self, sequences: int, context: int) -> BatchInput:
        """Return a decode step, on the host, of `sequences` sequences with contexts of about `context` tokens. Every
        page of a sequence's history is the first page, which an earlier step has written. The new token has its own
        page, the last."""
        history = (context - 1) // self._page_size
        pages = [0] * history + [self._table[-1]]
        items = [
            BatchItem(f"warm-up-{n}", [0], history * self._page_size, pages, wants_logits=True)
            for n in range(sequences)
        ]
        tables = BlockTables(max_seqs=sequences, max_pages=len(pages))
        return build_batch(items, tables, self._page_size, torch.device("cpu"))

    def tokens_that_fit(self, most_tokens: int) -> int:
        """Return how many tokens of a prompt the device has memory for in a step: tries `most_tokens`, then half of
        that, and so on. Raises ModelRefused if it has no memory for any."""
        tokens = min(most_tokens, self._most_rows)
        while tokens >= _LEAST_TOKENS:
            try:
                self._seconds(0, tokens)
            except RuntimeError as error:
                if not lacks_memory(error):
                    raise
                tokens //= 2
            else:
                return tokens
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        raise ModelRefused("the device has no memory for a step beside weights and KV: lower cache.hbm_tokens")

    def efficient_tokens(self, most_tokens: int) -> int:
        """Return the fewest prompt tokens per step (a power of 2 from 32, or `most_tokens`) at which this model
        computes at least two thirds of its best rate of tokens."""

        return efficient_tokens(lambda tokens: self._least_seconds(0, tokens), min(most_tokens, self._most_rows))

    def rows_agree(self, most_rows: int) -> bool:
        """Return whether up to `most_rows` rows of a sequence have the same logits together as one by one, to the bit.
        A draft is computed as several rows of one sequence, so drafts change no answer if this is true."""
        first = self._page_size
        count = min(most_rows, self._most_rows - first)
        if count < 2:
            return False
        self._logits(0, first)
        one_by_one = torch.cat([self._logits(first + row, 1) for row in range(count)])
        return all(
            torch.equal(self._logits(first, rows), one_by_one[:rows])
            for rows in (2, _FEW_AT_ONCE, count)
            if rows <= count
        )

    def _logits(self, first: int, count: int) -> Tensor:
        """Return the logits of every row of a step."""
        tokens = [(7 * place) % _TRIED_TOKENS for place in range(first, first + count)]
        item = BatchItem("warm-up", tokens, first, self._table, wants_logits=True, draft_rows=count - 1)
        return self._runner.forward(build_batch([item], self._tables, self._page_size, self._device), None).clone()

    def _least_seconds(self, first: int, count: int) -> float:
        """Return the seconds of a step, of the faster one of two if it is short enough to be disturbed."""
        seconds = self._seconds(first, count)
        return seconds if seconds > _LONG_S else min(seconds, self._seconds(first, count))

    def _seconds(self, first: int, count: int) -> float:
        item = BatchItem("warm-up", [0] * count, first, self._table, wants_logits=True)
        batch = build_batch([item], self._tables, self._page_size, self._device)
        started = time.perf_counter()
        self._runner.forward(batch, None)[0, 0].item()  # waits for the device
        return time.perf_counter() - started


def efficient_tokens(seconds: Callable[[int], float], most_tokens: int) -> int:
    """Return the smallest efficient number of tokens per step: the fewest, among powers of 2 from 32 to most_tokens,
    with which the model computes at least two thirds of the best rate that was measured. seconds: runs a step of so
    many tokens and returns its duration. Larger steps are not tried after one that takes long."""
    rates: dict[int, float] = {}
    tokens = min(_LEAST_TOKENS, most_tokens)
    while True:
        took_s = seconds(tokens)
        rates[tokens] = tokens / took_s
        if 2 * tokens > most_tokens or took_s > _LONG_S:
            return min(n for n, rate in rates.items() if rate >= _EFFICIENT_SHARE * max(rates.values()))
        tokens *= 2
