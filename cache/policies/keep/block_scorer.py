"""Defines the interface of scorers, which say which blocks of a full window are wanted least."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

Needs = Literal["tokens", "attention"]


@dataclass(frozen=True, slots=True)
class CutBlocks:
    """The blocks that may be dropped from a window, the oldest first, with their tokens and the attention that each
    got. The lists are of one length, but `attention` is empty unless the scorer needs it."""

    tokens: Sequence[Sequence[int]]
    newest: Sequence[int]  # tokens of the newest message, for which there has to be room
    # How much later tokens attended to a block, in units of what every block would get if all got the same. None: this
    # was not seen.
    attention: Sequence[float | None] = ()


class BlockScorer(Protocol):
    """A scorer of the blocks that may be dropped from a window. The Keeper calls it. Pure and deterministic; stores
    nothing between calls."""

    needs: Needs  # what it reads beside the tokens

    def score(self, blocks: CutBlocks) -> Sequence[float] | None:
        """Return a number for each block; the blocks with the lowest are dropped. None: the oldest are dropped, up to
        where a message begins."""
        ...


def with_guesses(known: Sequence[float | None]) -> list[float] | None:
    """Replace unknown values by the median of the known ones, which counts as neither wanted nor unwanted. Returns None
    if nothing is known."""
    values = [value for value in known if value is not None]
    if not values:
        return None
    middle = median(values)
    return [middle if value is None else value for value in known]
