"""Chooses between loading blocks and computing them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reprise.cache.rates import Rates


class LoadOption(NamedTuple):
    """A block after the prefix in HBM that a lower tier could deliver."""

    size_bytes: int
    source: str  # the direction it would take, as in Rates
    num_tokens: int


def first_token_s(load_s: float, compute_s: float, num_layers: int) -> float:
    """Return the seconds of a step whose load arrives layer by layer while it computes (AttentionStore §3.2.1). Layer i
    starts when (i+1)/n of the load has arrived, and the n-i layers from it on follow. Either the first or the last
    layer decides: max(load/n + compute, load + compute/n)."""
    return max(load_s, compute_s) + min(load_s, compute_s) / num_layers


def choose_load(blocks: Sequence[LoadOption], rates: Rates, new_tokens: int) -> int:
    """Return how many leading blocks to load; the others are computed with the `new_tokens` after them.

    Returns len(blocks) if the first token then comes no later than if all were computed, even if loading only some were
    faster still, because loading leaves the processors to others. Otherwise returns the number with which the first
    token comes soonest; 0: computing all is fastest. In this second case one more block is added now and then, to
    measure the link again (`Rates.is_look_due`).

    All directions (`dram_to_hbm`, `disk_to_hbm` and so on) are taken to share one load stream, so their times add up.
    If a tier becomes faster, the result, without the block that is added to measure, never becomes smaller, because the
    time saved is largest where most blocks are loaded.
    """
    tokens = new_tokens + sum(block.num_tokens for block in blocks)
    best, best_s = 0, rates.compute_s(tokens)
    sizes: dict[str, int] = {}
    for block in blocks:
        sizes[block.source] = sizes.get(block.source, 0) + block.size_bytes
    load_all_s = sum(rates.load_s(source, size) for source, size in sizes.items())
    if not blocks or first_token_s(load_all_s, rates.compute_s(new_tokens), rates.num_layers) <= best_s:
        return len(blocks)
    for count, (load_s, left) in enumerate(_prefixes(blocks, rates, tokens), start=1):
        total_s = first_token_s(load_s, rates.compute_s(left), rates.num_layers)
        if total_s <= best_s:
            best, best_s = count, total_s
    return best + (best < len(blocks) and rates.is_look_due(blocks[best].source))


def _prefixes(blocks: Sequence[LoadOption], rates: Rates, tokens: int) -> Iterable[tuple[float, int]]:
    """Yield (seconds to load the first n blocks, tokens left to compute) for n = 1, 2, ..."""
    sizes: dict[str, int] = {}
    for block in blocks:
        sizes[block.source] = sizes.get(block.source, 0) + block.size_bytes
        tokens -= block.num_tokens
        yield sum(rates.load_s(source, size) for source, size in sizes.items()), tokens
