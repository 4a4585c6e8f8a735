"""Compares pieces of text by the tokens they share. A rare token counts for more than a common one."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest

Vector = dict[int, float]
"""Token -> weight, of length 1."""

_MOST_TOKENS = 96  # of a vector: those with the most weight


class WordWeights:
    """Knows how rare every token is in a text: in how few of its blocks it occurs."""

    def __init__(self, blocks: Sequence[Iterable[int]]) -> None:
        self._num_blocks = len(blocks)
        self._blocks_with = Counter(token for block in blocks for token in set(block))

    def rarity(self, token: int) -> float:
        """Return the weight of a token; see `rarity`."""
        return rarity(self._blocks_with[token], self._num_blocks)

    def vector(self, tokens: Iterable[int]) -> Vector:
        """Return the direction of a piece of text; empty if it has no token."""
        weights = {token: (1 + math.log(n)) * self.rarity(token) for token, n in Counter(tokens).items()}
        if len(weights) > _MOST_TOKENS:
            weights = {token: weights[token] for token in nlargest(_MOST_TOKENS, weights, key=weights.__getitem__)}
        return unit(weights)


def rarity(having: int, blocks: int) -> float:
    """Return the weight of a token that so many of the blocks have (BM25's), between nearly 0 where all have it and
    log(2 blocks + 2) where none has."""
    return math.log1p((blocks - having + 0.5) / (having + 0.5))


def unit(weights: Mapping[int, float]) -> Vector:
    """Return the same direction with length 1."""
    length = math.sqrt(sum(weight * weight for weight in weights.values()))
    return {token: weight / length for token, weight in weights.items()} if length else {}


def cosine(a: Vector, b: Vector) -> float:
    if len(a) > len(b):
        a, b = b, a
    return sum(weight * b[token] for token, weight in a.items() if token in b)
