"""Implements the prefetch timer (CaR §III-B-2): decides when to start a waiting request's load so that it ends as its
turn comes."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def due(opens_s: Iterable[float], loading_s: float, waiting: Iterable[tuple[T, float | None]]) -> list[T]:
    """Return the requests whose loads have to start now, in the order of `waiting`.

    opens_s: seconds until each place in the batch is expected to be free, ascending; 0 for a free one. loading_s:
    seconds that the current loads still take. waiting: the next requests, in the order in which they start, each with
    the seconds that its load would take (SIZE / bandwidth in the paper CaR); None: it has nothing to load.

    The paper CaR starts the load of the next request once the smallest of `opens_s` is no longer than SIZE / bandwidth.
    This function compares the request after it with the second smallest, and so on. Loads follow one another, so the
    time of a load includes those ahead of it.
    """
    found = []
    for place_s, (request, load_s) in zip(opens_s, waiting, strict=False):
        if load_s is not None:
            loading_s += load_s
            if place_s <= loading_s:
                found.append(request)
    return found
