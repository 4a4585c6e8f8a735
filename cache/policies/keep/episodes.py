"""Keeps some of every episode (EpiCache, arXiv 2509.17396)."""

from collections.abc import Sequence

from reprise.cache.policies.keep.block_scorer import CutBlocks, Needs
from reprise.cache.policies.keep.words import Vector, WordWeights, cosine, unit

_PIECE_BLOCKS = 4  # the least blocks of a piece, which is in one episode as a whole
_MOST_PIECES = 64
_PIECES_PER_EPISODE = 6
_MOST_EPISODES = 8
_ROUNDS = 6  # of k-means
_NEAREST_BONUS = 0.25  # of an episode, by which more is kept of the one that the newest message is about


class EpisodeScorer:
    """Sorts the text into episodes, pieces that share rare tokens, and drops an equal share of each: first the blocks
    whose tokens are the most common. More stays of the episode that the newest message is most like.
    Differs from the paper: a piece's vector is made of its tokens, not by another model; what stays of an episode is
    chosen by how rare its tokens are, not by attention; and the episodes lie in one context, not in a cache of their
    own each. Names in dialogues: blocks with rare tokens kept 53 % of them where chance kept 23 %, and blocks that are
    most like their episode 23 %."""

    needs: Needs = "tokens"

    def score(self, blocks: CutBlocks) -> Sequence[float] | None:
        count = len(blocks.tokens)
        if not count:
            return None
        words = WordWeights(blocks.tokens)
        size = max(_PIECE_BLOCKS, -(-count // _MOST_PIECES))
        pieces = [
            words.vector(token for block in blocks.tokens[first : first + size] for token in block)
            for first in range(0, count, size)
        ]
        centres, episode_of = _episodes(pieces)
        newest = words.vector(blocks.newest)
        asked = _nearest(newest, centres)
        bonus = _NEAREST_BONUS if cosine(newest, centres[asked]) > 0 else 0.0
        members: list[list[int]] = [[] for _ in centres]
        for block in range(count):
            members[episode_of[block // size]].append(block)
        told = [sum(words.rarity(token) for token in sorted(set(block))) for block in blocks.tokens]
        scores = [0.0] * count
        for episode, own in enumerate(members):
            for rank, block in enumerate(sorted(own, key=lambda block: (told[block], block))):
                scores[block] = (rank + 1) / len(own) + (bonus if episode == asked else 0.0)
        return scores


def _episodes(pieces: Sequence[Vector]) -> tuple[list[Vector], list[int]]:
    """Sort pieces by k-means over cosines. Returns the centre of each episode and the episode of each piece. Begins
    with pieces that are far apart, so that equal texts give equal episodes."""
    count = max(1, min(_MOST_EPISODES, len(pieces) // _PIECES_PER_EPISODE))
    centres = [pieces[0]]
    closest = [cosine(piece, pieces[0]) for piece in pieces]
    while len(centres) < count:
        far = min(range(len(pieces)), key=closest.__getitem__)
        centres.append(pieces[far])
        closest = [max(near, cosine(piece, pieces[far])) for near, piece in zip(closest, pieces, strict=True)]
    episode_of = [_nearest(piece, centres) for piece in pieces]
    for _ in range(_ROUNDS):
        centres = [_centre(pieces, episode_of, episode) or centres[episode] for episode in range(count)]
        before, episode_of = episode_of, [_nearest(piece, centres) for piece in pieces]
        if before == episode_of:
            break
    return centres, episode_of


def _nearest(piece: Vector, centres: Sequence[Vector]) -> int:
    return max(range(len(centres)), key=lambda episode: cosine(piece, centres[episode]))


def _centre(pieces: Sequence[Vector], episode_of: Sequence[int], episode: int) -> Vector:
    total: Vector = {}
    for piece, own in zip(pieces, episode_of, strict=True):
        if own == episode:
            for token, weight in piece.items():
                total[token] = total.get(token, 0.0) + weight
    return unit(total)
