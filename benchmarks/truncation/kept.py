"""Cuts a text as a server does that keeps what a scorer wants: the server's own planning, scorers and choice of what is
recalled, on the KV of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.truncation.quality import Bench, SavedKv
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import Range, blocks_of, merge_cuts, plan_cut, subtract
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.policies.keep.block_scorer import CutBlocks
from reprise.cache.policies.keep.recall import choose
from reprise.cache.requests.keeping import attention_now
from reprise.cache.requests.recalling import most_recalled
from reprise.kernels.attention.watched import WatchedAttention

CHUNK = 512  # tokens of a prompt that a server on CPU computes at a time
RATIO = 0.5  # of the window, dropped at a cut


@dataclass(frozen=True, slots=True)
class Read:
    """A text that was computed, and what there is to know of its blocks."""

    token_ids: list[int]
    saved: list[SavedKv]
    attention: list[float]


class KeptBench(Bench):
    """Notes how the end of each chunk attends to blocks, as a server does."""

    def __init__(self, model: Path, window: int, max_tokens: int) -> None:
        super().__init__(model, window, max_tokens)
        self._watch = WatchedAttention(self._runner.backend, num_layers=len(self.pages), block_tokens=BLOCK_TOKENS)
        self._runner.watch = self._watch

    def read(self, token_ids: Sequence[int]) -> Read:
        """Fill the pages with a text from position 0, chunk by chunk."""
        self.length, layers = 0, range(len(self.pages))
        attention: list[float] = []
        parts: list[list[SavedKv]] = []
        for start in range(0, len(token_ids), CHUNK):
            self._run(token_ids[start : start + CHUNK], torch.zeros(1, dtype=torch.int64))
            parts.append([self._capture.layers[layer] for layer in layers])
            shares = self._watch.take().get(0, [])
            before = [*attention, *[None] * (len(shares) - len(attention))]
            attention = [attention_now(old, now, len(shares)) for old, now in zip(before, shares, strict=True)]
        saved = [
            SavedKv(torch.cat([part[layer].k_plain for part in parts]), torch.cat([part[layer].v for part in parts]))
            for layer in layers
        ]
        return Read(list(token_ids), saved, attention)


def cut(read: Read, scorer: str, newest: Sequence[int], *, window: int, reserve: int, keep_first: int) -> list[Range]:
    """Return what a server drops of a text when the message `newest` follows it and has to fit."""
    chosen = BLOCK_SCORERS[scorer]()

    def scores_of(starts: Sequence[int]) -> Sequence[float] | None:
        blocks = [start // BLOCK_TOKENS for start in starts]
        return chosen.score(
            CutBlocks(
                tokens=[read.token_ids[start : start + BLOCK_TOKENS] for start in starts],
                newest=newest,
                attention=[read.attention[block] for block in blocks],
            )
        )

    length = len(read.token_ids)
    return plan_cut(
        length, window=window, ratio=RATIO, reserve=reserve, keep_first=keep_first, newest=length, starts=(), marked=(),
        scores_of=scores_of,
    )  # fmt: skip


def recall(
    token_ids: Sequence[int], cuts: Sequence[Range], newest: Sequence[int], *, window: int, keep_first: int
) -> list[Range]:
    """Return the cuts after a server has brought back what the message `newest` is about, for the oldest of the
    rest."""
    blocks = [token_ids[start : start + BLOCK_TOKENS] for start in range(0, len(token_ids), BLOCK_TOKENS)]
    dropped = [start // BLOCK_TOKENS for start in blocks_of(cuts)]
    kept = sorted({*range(len(token_ids) // BLOCK_TOKENS)} - set(dropped))
    found = choose([(b, blocks[b]) for b in dropped], [blocks[b] for b in kept], newest, most_recalled(window))
    head = -(-keep_first // BLOCK_TOKENS)
    victims = [block for block, spared in zip(kept, found.spared, strict=True) if block >= head and not spared]
    count = min(len(found.places), len(victims))
    return subtract(merge_cuts([], [*cuts, *_ranges(victims[:count])]), _ranges(found.places[:count]))


def _ranges(blocks: Sequence[int]) -> list[Range]:
    return [(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in blocks]
