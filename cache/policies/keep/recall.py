"""Chooses which dropped blocks a new message is about (after EpiCache, arXiv 2509.17396)."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_RARE_SHARE = 8  # a token tells what a message is about if at most one block in so many has it
_COMMON_SHARE = 2  # a token tells nothing if more than one block in so many has it
_NEIGHBOUR_SHARES = (0.7, 0.5)  # shares of its neighbours' relevance that count for a block, at a distance of 1 and 2
_LEAST_RELEVANCE_SHARE = 0.4  # share of the highest relevance below which no block is recalled


class Recall(NamedTuple):
    """The blocks that a message is about."""

    places: list[int]  # places of the dropped blocks to bring back, the most relevant first
    spared: list[bool]  # for each kept block, whether the message is about it too


def choose(
    dropped: Sequence[tuple[int, Collection[int]]], kept: Sequence[Collection[int]], query: Sequence[int], most: int
) -> Recall:
    """Choose at most `most` dropped blocks for the message `query`. dropped: (place in the conversation, tokens) of
    each dropped block. kept: tokens of each block in the window.

    A block is relevant by the tokens that it and its neighbours share with the message, and by how rare these are. Its
    neighbours are chosen with it, because an episode does not end where a block does. Differs from the paper: only
    tokens are compared, so that the choice is known before the message is computed.
    """
    asked = set(query)
    blocks = [*(tokens for _, tokens in dropped), *kept]
    shared = [sorted(asked.intersection(block)) for block in blocks]
    having = Counter(token for tokens in shared for token in tokens)
    relevance = _relevance(shared, having)
    at = {place: number for number, (place, _) in enumerate(dropped)}
    around = {place: _around(place, at, relevance) for place in at}
    there = {number: number + len(dropped) for number in range(len(kept))}
    around_kept = [_around(number, there, relevance) for number in there]
    least = _LEAST_RELEVANCE_SHARE * max([*around.values(), *around_kept], default=0.0)
    rare = max(2, len(blocks) // _RARE_SHARE)
    chosen: dict[int, None] = {}
    for place in sorted(at, key=lambda place: (-around[place], -place)):
        near = [at[beside] for beside in range(place - 2, place + 3) if beside in at]
        tells = any(having[token] <= rare for number in near for token in shared[number])
        if around[place] < least or not tells:
            continue
        episode = [wanted for wanted in (place, place + 1, place - 1) if wanted in at]
        for wanted in sorted(episode, key=lambda wanted: -relevance[at[wanted]]):
            if len(chosen) < most:
                chosen[wanted] = None
    return Recall(list(chosen), [0 < least <= value for value in around_kept])


def _relevance(shared: Sequence[Sequence[int]], having: Counter[int]) -> list[float]:
    """Return each block's relevance to a message. shared: for each block, the message's tokens that are in it. having:
    for each token, how many blocks have it."""
    most = max(2, len(shared) // _COMMON_SHARE)
    weights = {token: _rarity(count, len(shared)) for token, count in having.items() if count <= most}
    return [sum(weights.get(token, 0.0) for token in tokens) for tokens in shared]


def _around(place: int, at: Mapping[int, int], relevance: Sequence[float]) -> float:
    """Return the relevance of the block at `place` plus a part of its neighbours' relevance. at: place -> index into
    `relevance`."""
    total = relevance[at[place]]
    for distance, part in enumerate(_NEIGHBOUR_SHARES, 1):
        total += part * sum(relevance[at[beside]] for beside in (place - distance, place + distance) if beside in at)
    return total


def _rarity(having: int, blocks: int) -> float:
    """Return the weight of a token that `having` of the blocks have (as in BM25): nearly 0 if all have it, log(2 blocks
    + 2) if none has."""
    return math.log1p((blocks - having + 0.5) / (having + 0.5))
