"""Implements the prefetch timer (CaR §III-B-2): decides when to start a waiting request's load so that it ends as its
turn comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """A waiting request and how many seconds its load would take, SIZE / bandwidth in the paper; None: nothing to
    load."""

    request_id: str
    load_s: float | None


def due(running_s: Iterable[float], free_places: int, queued_s: float, waiting: Sequence[WaitingLoad]) -> list[str]:
    """Return the ids of the requests whose loads have to start now, in order.

    running_s: expected seconds until each running request ends. queued_s: seconds that the current loads still take.
    waiting: the next requests, in the order in which they start. The paper starts the load of the next request once the
    smallest of `running_s` is no longer than SIZE / bandwidth. This function compares the request after it with the
    second smallest, and so on; loads follow one another, so the time of a load includes those ahead of it. Where a
    place in the batch is free, its load starts at once.
    """
    opens_s = [0.0] * max(0, free_places) + sorted(running_s)
    found = []
    for opens, load in zip(opens_s, waiting, strict=False):
        if load.load_s is None:
            continue
        queued_s += load.load_s
        if opens <= queued_s:
            found.append(load.request_id)
    return found
