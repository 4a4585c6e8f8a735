"""The shadow check (`cache.verify_rate`): recompute a sample of what was loaded, and compare.

Checksums say that bytes are those that were written. This says that they were the right ones: a layout, a rotation or a
key that does not mean what it says shows in the logits.
"""

import logging
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cache.manager import CacheManager
from engine.model.batch import BatchItem, BlockTables, build_batch
from engine.model.hf_model import ModelRunner
from engine.step.choices import RunningChoice

log = logging.getLogger(__name__)

# Of the load-time probe's tolerance, which is of a median row. Single rows scatter: of 600 loads into the bundled model
# in bf16 the median differed by 0.6 of it, the largest by 1.9. A wrong block differs by about as much as there is.
_ROW_SHARE = 3.0


class Verifier:
    """Runs in the engine's loop, between two steps: whoever is decoding waits for it, so rates are small."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        cache: CacheManager,
        page_size: int,
        device: torch.device,
        rate: float,
        logit_tolerance: float,
        chunk_tokens: int,
        rng: random.Random,
    ) -> None:
        self._runner, self._cache = runner, cache
        self._page_size, self._device = page_size, device
        self._rate, self._chunk_tokens, self._rng = rate, chunk_tokens, rng
        self._tolerance = _ROW_SHARE * logit_tolerance
        self.compared = 0
        self.mismatches = 0

    def disagreeing(self, ready: Sequence[RunningChoice], logits: Tensor) -> Iterator[RunningChoice]:
        """Yield the choices whose first token would be drawn from loaded KV that a recompute contradicts. The tiers it
        came from are not used any more. logits [len(ready), vocab]. Each has to start anew before the next is asked
        for, which may need its room."""
        for row, choice in enumerate(ready):
            tiers = _loaded_from(choice)
            if not tiers or self.agrees(choice.sequence.token_ids, logits[row]):
                continue
            log.error("a recompute disagrees with what came from %s: not used any more", " and ".join(tiers))
            for tier in tiers:
                self._cache.quarantine(tier)
            self._cache.requests.distrust(choice.sequence.request_id)
            yield choice

    def agrees(self, token_ids: Sequence[int], logits: Tensor) -> bool:
        """Whether a recompute of all tokens ends with these logits [vocab]; True too if it was not asked, which is so
        for a share of 1 - rate, and when HBM has no room for a second copy."""
        if self._rng.random() >= self._rate:
            return True
        pages = self._cache.borrow(-(-len(token_ids) // self._page_size))
        if pages is None:
            return True
        try:
            expected = self._recompute(list(token_ids), pages)
        finally:
            self._cache.give_back(pages)
        self.compared += 1
        got, want = logits.float(), expected.float()
        error = (got - want).square().mean().sqrt() / (want - want.mean()).square().mean().sqrt()
        if bool(error <= self._tolerance):
            return True
        self.mismatches += 1
        return False

    def _recompute(self, token_ids: list[int], pages: list[int]) -> Tensor:
        """Logits [vocab] behind the last token."""
        tables = BlockTables(max_seqs=1, max_pages=len(pages))
        logits = None
        for first in range(0, len(token_ids), self._chunk_tokens):
            chunk = token_ids[first : first + self._chunk_tokens]
            item = BatchItem("verify", chunk, first, pages, wants_logits=True)
            logits = self._runner.forward(build_batch([item], tables, self._page_size, self._device), None)
        assert logits is not None
        return logits[0]


def _loaded_from(choice: RunningChoice) -> list[str]:
    """The tiers that the KV of a choice came from, while its first token is not drawn. None after a cut, where a
    recompute is another text, nor on KV that a codec has changed."""
    report = choice.report
    if report is None or choice.reported or choice.sequence.output_tokens:
        return []
    if report.truncated_tokens or report.coded_tokens:
        return []
    loaded = {"dram": report.dram_tokens, "disk": report.disk_tokens}
    return [tier for tier, tokens in loaded.items() if tokens]
