"""Decides which requests share a mini-batch: HybridServe's greedy bin packing (§4.3.3). Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """The tokens of a request's context that a layer needs, by the form in which they are stored."""

    act: int  # tokens of whose activations keys and values are made
    kv: int  # loaded as they are


def imbalance(load: Load, *, make_s: Callable[[int], float], load_s: Callable[[int], float]) -> float:
    """Return the paper's F: the longer of the times for computing and for loading divided by the shorter, less 1. 0 if
    they are equal; infinite if just one of them is 0. make_s: seconds to compute the KV of so many tokens. load_s:
    seconds to load it."""
    made, loaded = make_s(load.act), load_s(load.kv)
    least, most = min(made, loaded), max(made, loaded)
    return most / least - 1 if least else (float("inf") if most else 0.0)


def pack(
    requests: Sequence[Load],
    *,
    most_tokens: int,
    make_s: Callable[[int], float],
    load_s: Callable[[int], float],
) -> list[list[int]]:
    """Return mini-batches, as lists of indices into `requests`. The first remaining request opens one. Then each
    request joins that fits and does not increase the batch's `imbalance`. most_tokens: those that a buffer holds; a
    request that exceeds it is alone. make_s: seconds to compute the KV of so many tokens. load_s: seconds to load
    it."""
    left, batches = list(range(len(requests))), []
    while left:
        batch, total = [left[0]], requests[left[0]]
        now = imbalance(total, make_s=make_s, load_s=load_s)
        others = []
        for place in left[1:]:
            more = requests[place]
            joined = Load(total.act + more.act, total.kv + more.kv)
            then = imbalance(joined, make_s=make_s, load_s=load_s)
            if joined.act + joined.kv <= most_tokens and then <= now + 1e-9:
                batch.append(place)
                total, now = joined, then
            else:
                others.append(place)
        batches.append(batch)
        left = others
    return batches
