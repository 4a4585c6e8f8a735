"""Chooses what of a recorded answer goes into a prompt again."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from app.conversations.rendered_chat import TextTokenizer
from app.conversations.transcript_store import RecordedAnswer

MAX_STEPS_BACK = 8  # tokens that a cut may move back to reach a whole character


@dataclass(frozen=True, slots=True)
class Splice:
    """A cut of the request's text: first that of the stored ids that are kept, then `rest`."""

    kept_tokens: int  # number of the answer's tokens that are kept
    rest: str


def cut(tokenizer: TextTokenizer, answer: RecordedAnswer, limit: int, shown: str, tail: str) -> Splice:
    """Keep the answer's whole tokens within its first `limit` characters, which begin `shown`."""
    ids, ends = answer.token_ids, answer.ends
    if limit == len(answer.text) and (not ends or ends[-1] <= limit):
        tokens = len(ids)
        while tokens and ids[tokens - 1] in tokenizer.special_ids:
            tokens -= 1
        if tokenizer.decode(ids[:tokens], skip_special_tokens=True) == answer.text:
            return Splice(tokens, shown[limit:] + tail)
    # A token after which no more text was complete may hold the first bytes of the next character: the first token that
    # completed the text is the one to end with. It may hold such bytes as well; then its decoded text tells.
    count = bisect_right(ends, limit)
    for _ in range(MAX_STEPS_BACK):
        complete = ends[count - 1] if count else 0
        if complete == 0:
            break
        tokens = bisect_left(ends, complete) + 1
        if tokenizer.decode(ids[:tokens], skip_special_tokens=True) == answer.text[:complete]:
            return Splice(tokens, shown[complete:] + tail)
        count = tokens - 1
    return Splice(0, shown + tail)


def common_chars(a: str, b: str) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_ids(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
