"""Makes the queue of waiting requests by the name that settings give its order."""

from functools import partial

from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.queues.due import DueQueue
from reprise.scheduler.queues.fair_share import FairShare, cost_of
from reprise.scheduler.queues.hidden import HiddenWindow, standing_if_exposed
from reprise.scheduler.queues.priority import PriorityQueue, Standings, standing
from reprise.scheduler.queues.waiting_queue import FcfsQueue, WaitingQueue
from reprise.scheduler.queues.window import ShuffledWindow

WINDOWED = ("car", "car-hidden")  # by class in a window
FAIR = ("due", *WINDOWED)  # between tenants
ORDERS = (*FAIR, "priority", "fcfs")


def make_queue(
    policy: str,
    *,
    cache: CacheView,
    predictor: LengthPredictor,
    window: int,
    patience: float,
) -> WaitingQueue:
    """Return a queue of the policy with this name, one of ORDERS. window: how many of the next requests the policies
    "car" and "car-hidden" may reorder; other policies ignore it. patience: see `DueQueue`."""
    if policy not in ORDERS:
        raise ValueError(f"unknown scheduling policy {policy!r}")
    by_residency = partial(Standings, cache=cache, standing=standing)
    by_exposure = partial(Standings, cache=cache, standing=standing_if_exposed)
    if policy == "fcfs":
        return FcfsQueue()
    if policy == "priority":
        return PriorityQueue(standings=by_residency())
    shares = FairShare(cost=partial(cost_of, cache=cache, predictor=predictor))
    if policy == "due":
        return DueQueue(cache=cache, shares=shares, patience=patience)
    queue, standings = (ShuffledWindow, by_residency) if policy == "car" else (HiddenWindow, by_exposure)
    return queue(size=window, entry=shares, standings=standings())
