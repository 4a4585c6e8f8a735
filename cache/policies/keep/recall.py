"""Says which dropped episodes a new message is about (after EpiCache, arXiv 2509.17396)."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from cache.policies.keep.words import rarity

_RARE_SHARE = 8  # a token says what a message is about if at most one block in so many has it
_NEIGHBOUR = 0.5  # of the relevance of the block before or after: a sentence may begin in one and end in the other
_NEAR_BEST = 0.5  # of the highest relevance; what has less is not recalled


class Recall(NamedTuple):
    """What a message is about."""

    places: list[int]  # of the dropped blocks to bring back, the most relevant first
    spared: list[bool]  # of each kept block, whether the message is about it too


def choose(
    dropped: Sequence[tuple[int, Collection[int]]], kept: Sequence[Collection[int]], query: Sequence[int], most: int
) -> Recall:
    """Choose at most `most` dropped blocks for the message `query`. dropped: the place of each in the conversation,
    with its tokens. A block is relevant by the rare tokens that it shares with the message. It brings back its
    neighbours too, because an episode does not end where a block does. Differs from the paper: nothing but tokens is
    compared, so that this is known before the message is computed."""
    relevance = _relevance([*(tokens for _, tokens in dropped), *kept], query)
    at = {place: number for number, (place, _) in enumerate(dropped)}
    around = [
        relevance[number]
        + _NEIGHBOUR * max(relevance[at[beside]] if beside in at else 0.0 for beside in (place - 1, place + 1))
        for place, number in at.items()
    ]
    least = _NEAR_BEST * max([*around, *relevance[len(dropped) :]], default=0.0)
    chosen: dict[int, None] = {}
    for place, number in sorted(at.items(), key=lambda pair: (-around[pair[1]], -pair[0])):
        if around[number] < least or relevance[number] <= 0:
            continue
        for wanted in (place, place + 1, place - 1):
            if wanted in at and len(chosen) < most:
                chosen[wanted] = None
    return Recall(list(chosen), [0 < least <= value for value in relevance[len(dropped) :]])


def _relevance(blocks: Sequence[Collection[int]], query: Sequence[int]) -> list[float]:
    asked = set(query)
    shared = [sorted(asked.intersection(block)) for block in blocks]
    having = Counter(token for tokens in shared for token in tokens)
    most = max(2, len(blocks) // _RARE_SHARE)
    weights = {token: rarity(count, len(blocks)) for token, count in having.items() if count <= most}
    return [sum(weights.get(token, 0.0) for token in tokens) for tokens in shared]
