"""A model on pages of its own, without an engine, whose texts lie side by side and may be read in part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.harness.in_process import config
from reprise.engine.build.model import load, probe_model
from reprise.engine.build.selector import build_selector
from reprise.engine.codec.quality import Quality
from reprise.engine.model.batch import BatchInput, BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.pages import make_pages
from reprise.kernels.attention.ragged_batch import KvPages, PageFormat, Selection
from reprise.kernels.attention.selection import Candidates, KvSelector, Selecting

CHUNK = 512  # tokens of a prompt that are computed together
LEAST_TOKENS = 2048  # tokens of a text's pages: selectors calibrate on as many of 2,000 tokens as fit


@dataclass
class Counting:
    """A selector that passes each choice of another selector on, and counts the share of the contexts that it chose."""

    inner: KvSelector
    read: float = 0.0  # shares of contexts, summed
    asked: int = field(default=0)

    def __post_init__(self) -> None:
        self.name, self.looks_ahead = self.inner.name, self.inner.looks_ahead
        self.index_bytes_per_token = self.inner.index_bytes_per_token

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """Implement `KvSelector.choose`."""
        found = self.inner.choose(layer, queries, kv, candidates)
        if found is not None:
            share = found.counts.float().mean(1) / torch.tensor(candidates.contexts)
            self.read, self.asked = self.read + float(share.sum()), self.asked + len(share)
        return found


class Reader:
    """A model with pages for the KV of `texts` texts of at most `most_tokens` tokens each. One call at a time."""

    def __init__(self, model: Path, *, texts: int, most_tokens: int, share: float, threads: int | None) -> None:
        """Set up. share: the share of a context's tokens that selectors may choose. threads: number of torch's threads;
        None: as many as by default."""
        flags: dict[str, str | int | float] = {"selector.name": "infinigen", "selector.share": share}
        self.config = config(str(model), flags | ({"engine.threads": threads} if threads else {}))
        self._loaded = load(self.config)
        self.probed = probe_model(self._loaded, self.config)
        self._page_size, self._texts = self.probed.page_size, texts
        self._most_tokens = max(most_tokens, LEAST_TOKENS)
        self._per_text = -(-self._most_tokens // self._page_size)
        device = self._loaded.device
        shapes = self.probed.found.shapes
        self.pages = make_pages(shapes, texts * self._per_text, self._page_size, PageFormat(self._loaded.dtype), device)
        self.runner = ModelRunner(model=self._loaded.module, pages=self.pages, backend=self.probed.backend, sink=None)
        self.begin(None)

    def selecting(self, name: str) -> Selecting:
        """Return a calibrated selector. Calibration overwrites pages."""
        settings = msgspec.structs.replace(
            self.config, selector=msgspec.structs.replace(self.config.selector, name=name)
        )
        found = build_selector(
            settings, self._loaded, self.probed, self.runner, num_pages=self._texts * self._per_text,
            max_context=self._most_tokens,
        )  # fmt: skip
        assert found is not None
        return found

    def begin(self, selecting: Selecting | None) -> None:
        """Make all later decode steps use a selector; None: they read whole contexts. What selectors have learned of
        the pages so far is discarded."""
        self.runner.selecting = selecting
        self._tables = BlockTables(max_seqs=self._texts, max_pages=self._per_text)

    def prompt(self, text: int, ids: Sequence[int], first: int, logit_rows: int = 1) -> Tensor:
        """Compute the tokens `ids` of a text, from position `first` on. Returns the logits after its last tokens
        [logit_rows, vocab]; more than one only if all tokens fit one chunk."""
        logits = torch.empty(0)
        for start in range(0, len(ids), CHUNK):
            chunk = list(ids[start : start + CHUNK])
            rows = len(chunk) - 1 if logit_rows > 1 else 0
            item = BatchItem(f"text {text}", chunk, first + start, self._pages_of(text), True, prompt_rows=rows)
            logits = self.run(self._batch([item]))
        return logits[-logit_rows:]

    def decoding(self, ids: Mapping[int, int], place: Mapping[int, int]) -> BatchInput:
        """Return the batch of a decode step, with one token of each of some texts. ids: text -> token. place: text ->
        position. If a selector is in use, the step reads what it chooses of the contexts."""
        return self._batch(
            [
                BatchItem(f"text {text}", [token], place[text], self._pages_of(text), True, partial=True)
                for text, token in ids.items()
            ]
        )

    def decode(self, ids: Mapping[int, int], place: Mapping[int, int]) -> Tensor:
        """Run a decode step as `decoding` makes it. Returns the logits [texts, vocab], in the order of `ids`."""
        return self.run(self.decoding(ids, place))

    @torch.inference_mode()
    def run(self, batch: BatchInput) -> Tensor:
        return self.runner.forward(batch, None)

    def copy_first(self, tokens: int) -> None:
        """Copy the KV of the first `tokens` tokens of text 0 to all other texts."""
        count = -(-tokens // self._page_size)
        for layer in self.pages:
            for pool in (layer.k, layer.v):
                for first in range(self._per_text, len(pool), self._per_text):
                    pool[first : first + count] = pool[:count]

    def fill(self, group: Sequence[Tensor], history: int) -> None:
        """Compute the first `history` tokens of some texts as prompts, with whole contexts."""
        self.begin(None)
        for text, ids in enumerate(group):
            self.prompt(text, ids[:history].tolist(), 0)

    def read_behind(self, group: Sequence[Tensor], history: int, selecting: Selecting | None) -> list[Tensor]:
        """Decode the tokens of some texts after their first `history` ones, one by one. Returns for each text the log
        probabilities of the next token after each of these tokens but the last [tokens, vocab]."""
        self.begin(selecting)
        found: list[list[Tensor]] = [[] for _ in group]
        for place in range(history, len(group[0]) - 1):
            ids = {text: int(tokens[place]) for text, tokens in enumerate(group)}
            for text, row in enumerate(self.decode(ids, dict.fromkeys(ids, place)).float().log_softmax(-1)):
                found[text].append(row)
        return [torch.stack(rows) for rows in found]

    def _pages_of(self, text: int) -> list[int]:
        return list(range(text * self._per_text, (text + 1) * self._per_text))

    def _batch(self, items: list[BatchItem]) -> BatchInput:
        return build_batch(items, self._tables, self._page_size, self._loaded.device)


def compared_rows(plain: Tensor, found: Tensor, following: Tensor) -> Quality:
    """Compare log probabilities [tokens, vocab] with whole contexts (`plain`) and with a selector (`found`). following:
    the tokens that come next."""
    return Quality(
        divergence=(plain.exp() * (plain - found)).sum(-1), same_choice=plain.argmax(-1) == found.argmax(-1),
        loss=-found.gather(1, following[:, None])[:, 0], raw_loss=-plain.gather(1, following[:, None])[:, 0],
        refused=0.0,
    )  # fmt: skip
