"""Sorts requests into CaR's three classes by the bytes they have to load (CaR §III-B-1)."""

from enum import IntEnum

from reprise.scheduler.ports import Residency


class TransferClass(IntEnum):
    """A request's class by what it has to load. The smaller class starts first."""

    IN_HBM = 1  # some of the session's own KV is in HBM and none is to come, even if a part has to be computed
    NOTHING_TO_LOAD = 2  # no history, all of it lost, or cheaper to recompute; a shared system prompt is no history
    LOADS = 3  # KV has to come from below; once all of it is in HBM, the request is in class 1


Standing = tuple[TransferClass, int]
"""A request's rank among those in the window: (class, bytes to load). The lowest starts first; the order of arrival
decides between equals."""


def standing(residency: Residency) -> Standing:
    """Return the request's rank (class, bytes to load) by the paper's rule: a load counts until it has ended, even if
    computation would hide it."""
    if residency.bytes_to_load:
        return TransferClass.LOADS, residency.bytes_to_load
    return standing_once_loaded(residency)


def standing_once_loaded(residency: Residency) -> Standing:
    """Return the rank (class, 0 bytes to load) that the request will have when all KV that it has to load is in HBM."""
    # Tokens that it has in common with others do not count: a flood that shares nothing but its first words would be
    # shuffled.
    return (TransferClass.IN_HBM if residency.own_tokens else TransferClass.NOTHING_TO_LOAD), 0
