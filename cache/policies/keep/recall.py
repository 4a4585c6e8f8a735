"""Says which dropped episodes a new message is about (after EpiCache, arXiv 2509.17396)."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_RARE_SHARE = 8  # a token tells what a message is about if at most one block in so many has it
_COMMON_SHARE = 2  # and one that more than every second block has tells nothing
_BESIDE = (0.7, 0.5)  # parts of the relevance of the blocks next to a block, and next to those, that count for it
_NEAR_BEST = 0.4  # of the highest relevance; what has less is not recalled


class Recall(NamedTuple):
    """What a message is about."""

    places: list[int]  # of the dropped blocks to bring back, the most relevant first
    spared: list[bool]  # of each kept block, whether the message is about it too


def choose(
    dropped: Sequence[tuple[int, Collection[int]]], kept: Sequence[Collection[int]], query: Sequence[int], most: int
) -> Recall:
    """Choose at most `most` dropped blocks for the message `query`. dropped: the place of each in the conversation,
    with its tokens. A block is relevant by the tokens that it and those around it share with the message, and by how
    rare these are; with it its neighbours come back, because an episode does not end where a block does. Differs from
    the paper: nothing but tokens is compared, so that this is known before the message is computed."""
    asked = set(query)
    blocks = [*(tokens for _, tokens in dropped), *kept]
    shared = [sorted(asked.intersection(block)) for block in blocks]
    having = Counter(token for tokens in shared for token in tokens)
    relevance = _relevance(shared, having)
    at = {place: number for number, (place, _) in enumerate(dropped)}
    around = {place: _around(place, at, relevance) for place in at}
    there = {number: number + len(dropped) for number in range(len(kept))}
    around_kept = [_around(number, there, relevance) for number in there]
    least = _NEAR_BEST * max([*around.values(), *around_kept], default=0.0)
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
    """Return how much each block has to do with a message. shared: the message's tokens that each has; having: how many
    have each."""
    most = max(2, len(shared) // _COMMON_SHARE)
    weights = {token: _rarity(count, len(shared)) for token, count in having.items() if count <= most}
    return [sum(weights.get(token, 0.0) for token in tokens) for tokens in shared]


def _around(place: int, at: Mapping[int, int], relevance: Sequence[float]) -> float:
    """Return the relevance of a block and, in part, of those around it."""
    total = relevance[at[place]]
    for distance, part in enumerate(_BESIDE, 1):
        total += part * sum(relevance[at[beside]] for beside in (place - distance, place + distance) if beside in at)
    return total


def _rarity(having: int, blocks: int) -> float:
    """Return the weight of a token that so many of the blocks have (BM25's), between nearly 0 where all have it and
    log(2 blocks + 2) where none has."""
    return math.log1p((blocks - having + 0.5) / (having + 0.5))
