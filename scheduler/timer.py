"""The prefetch timer (CaR §III-B-2): when to start the load of a request that waits, so that it ends as its turn
comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """A request that waits, and how long the KV it needs would take: SIZE / bandwidth; None: nothing to load."""

    request_id: str
    load_s: float | None


def due(running_s: Iterable[float], free_places: int, queued_s: float, waiting: Sequence[WaitingLoad]) -> list[str]:
    """Return the requests whose loads have to start now, in order.

    running_s: expected rest of each running request; queued_s: what is left of the loads under way; waiting: in the
    order in which they start. The paper asks of the next request whether min_i of the rests is no longer than SIZE /
    bandwidth. For the one after it that is the second smallest rest, and so on; loads go one after the other, so SIZE
    includes those ahead. With a place free the rest is 0, and the load starts at once.
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
