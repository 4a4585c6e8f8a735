"""Plans what a context drops when it outgrows the window (AttentionStore §3.4). Pure arithmetic."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reprise.cache.blocks.keys import BLOCK_TOKENS

Range = tuple[int, int]
"""A half-open range of tokens: (first, end)."""

ScoresOf = Callable[[Sequence[int]], Sequence[float] | None]
"""Returns how much each block is wanted, given the ascending offsets of their first tokens; None: the oldest are wanted
least."""

_MOST_EXTENSION = 0.25  # share of the window that a cut drops beyond `ratio` to end where a message begins
_NEWEST_SHARE = 0.25  # share of the droppable blocks that is dropped last, whatever its scores: the newest


class DoesNotFit(Exception):
    """An error of a truncation: the tokens that must not be dropped are more than the window holds."""


@dataclass(frozen=True, slots=True)
class CutRules:
    """One request's rules for truncation. Offsets count tokens of the request as it was sent."""

    allowed: bool  # whether history may be dropped
    keep_first: int  # number of leading tokens that stay
    message_starts: tuple[int, ...]  # offsets at which messages begin, increasing
    important: tuple[Range, ...]  # ranges that stay if possible
    begun_tokens: int = 0  # number of tokens at the end that begin the answer


def reserved(max_tokens: int, window: int) -> int:
    """Return how many tokens of the window a turn keeps free for its answer when it begins."""
    return max(1, min(max_tokens, window // 8))


def plan_cut(
    length: int,
    *,
    window: int,
    ratio: float,
    reserve: int,
    keep_first: int,
    newest: int,
    starts: Sequence[int],
    marked: Sequence[Range],
    scores_of: ScoresOf = lambda starts: None,
) -> list[Range]:
    """Choose the ranges of a context of `length` tokens to drop, so that it and `reserve` more tokens fit into
    `window`. Returns nothing if it fits as it is.

    ratio: share of the window to drop. keep_first: leading tokens that always stay. newest: where the newest message
    begins. starts: where messages begin. marked: ranges that stay if possible. scores_of: gives scores of blocks, or
    None.

    Drops whole blocks of the earliest history after `keep_first`: `ratio` of the window, extended to where a message
    begins (a block may hold the end of the previous message) if that is near, or more if that is not enough. A message
    that ends far away loses its beginning. If there are scores, the blocks with the least are dropped instead, and
    nothing is extended.

    Never drops anything from `newest` on. If the rest cannot make room for `reserve` tokens, all of it that may be
    dropped is dropped, and the answer gets the room that is left. Raises DoesNotFit if there is no room for a single
    token.
    """
    head = _up(keep_first)
    needed = length + reserve - window
    if needed <= 0:
        return []
    limit = _down(min(newest, length - 1))
    droppable = may_leave(keep_first, limit, marked)
    if sum(b - a for a, b in droppable) < needed:
        droppable = _without((head, limit), [])  # marks and the reserve are wishes, not conditions
        stays = length - max(0, limit - head)
        if stays >= window:
            raise DoesNotFit(f"{stays} tokens have to stay, the window holds {window}")
        if not droppable:
            return []
        needed = min(needed, length - stays)
    amount = max(needed, int(ratio * window))
    blocks = list(blocks_of(droppable))
    scores = scores_of(blocks)
    if scores is not None:
        return _least_wanted(blocks, scores, -(-amount // BLOCK_TOKENS))
    end = _end_of(droppable, amount)
    place = bisect_left(starts, end)
    if place < len(starts):
        boundary = _down(starts[place])
        if _dropped(droppable, boundary) >= needed and boundary - end <= _MOST_EXTENSION * window:
            end = max(end, boundary)
    return [(a, min(b, end)) for a, b in droppable if a < min(b, end)]


def may_leave(keep_first: int, limit: int, marked: Sequence[Range]) -> list[Range]:
    """Return the ranges between the first `keep_first` tokens and `limit` that may be dropped: whole blocks that touch
    no range in `marked`."""
    return _without((_up(keep_first), _down(limit)), [(_down(a), _up(b)) for a, b in marked])


def blocks_of(ranges: Sequence[Range]) -> Iterator[int]:
    """Yield the first token's offset of each block in ranges of whole blocks."""
    return (start for a, b in ranges for start in range(a, b, BLOCK_TOKENS))


def _least_wanted(blocks: Sequence[int], scores: Sequence[float], count: int) -> list[Range]:
    """Return the `count` blocks with the lowest scores, or all if there are fewer, as ranges. Among equals the oldest
    come first."""
    guarded = len(blocks) - int(_NEWEST_SHARE * len(blocks))
    chosen = sorted(range(len(blocks)), key=lambda place: (place >= guarded, scores[place], place))[:count]
    ranges: list[Range] = []
    for start in sorted(blocks[place] for place in chosen):
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], start + BLOCK_TOKENS)
        else:
            ranges.append((start, start + BLOCK_TOKENS))
    return ranges


def _down(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _up(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    rest, start = [], whole[0]
    for a, b in sorted(holes):
        if start < min(a, whole[1]):
            rest.append((start, min(a, whole[1])))
        start = max(start, b)
    if start < whole[1]:
        rest.append((start, whole[1]))
    return rest


def subtract(ranges: Sequence[Range], holes: Sequence[Range]) -> list[Range]:
    """Return the parts of `ranges` that lie in none of the `holes`."""
    return [part for whole in ranges for part in _without(whole, holes)]


def _end_of(ranges: Sequence[Range], amount: int) -> int:
    """Return the offset in the context by which the ranges contain `amount` tokens, counted from the first range's
    beginning and rounded up to whole blocks. If the ranges have fewer tokens, return the end of the last range."""
    end = ranges[0][0]
    for a, b in ranges:
        end = min(b, _up(a + amount))
        amount -= end - a
        if amount <= 0:
            break
    return end


def _dropped(ranges: Sequence[Range], end: int) -> int:
    return sum(max(0, min(b, end) - a) for a, b in ranges)


def apply_cuts(tokens: list[int], cuts: Sequence[Range]) -> list[int]:
    """Return the tokens outside the cuts, as a new list."""
    kept, start = [], 0
    for a, b in cuts:
        kept += tokens[start:a]
        start = b
    return kept + tokens[start:]


def map_offset(offset: int, cuts: Sequence[Range]) -> int:
    """Map an offset of the uncut text to the text after the cuts. An offset inside a cut maps to the place of the
    cut."""
    return offset - sum(min(offset, b) - a for a, b in cuts if a < offset)


def merge_cuts(cuts: Sequence[Range], more: Sequence[Range]) -> list[Range]:
    """Combine `cuts` with the later cuts `more`, whose offsets count in the text that `cuts` left, into cuts of the
    uncut text."""
    ranges = list(cuts)
    for a, b in more:
        ranges.append((_unmap(a, cuts, False), _unmap(b, cuts, True)))
    merged: list[Range] = []
    for a, b in sorted(ranges):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return merged


def unmap_offset(offset: int, cuts: Sequence[Range]) -> int:
    """Map an offset of the text after the cuts back to the uncut text, as the inverse of `map_offset`. The place of a
    cut maps to the cut's end."""
    return _unmap(offset, cuts, False)


def _unmap(offset: int, cuts: Sequence[Range], is_end: bool) -> int:
    """Invert `map_offset`. is_end: whether `offset` ends a range; if it lies at a cut, the result lies before the
    cut."""
    for a, b in cuts:
        if offset > a or (offset == a and not is_end):
            offset += b - a
    return offset
