"""Makes the policies by which requests start, by the names that settings give them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from reprise.scheduler.car.classes import Standings
from reprise.scheduler.car.timed_loads import TimedLoadAhead
from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.load_ahead import LoadAhead, LoadAheadMaker
from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.queues.due import DueQueue
from reprise.scheduler.queues.fair_share import FairShare, cost_of
from reprise.scheduler.queues.waiting_queue import FcfsQueue, WaitingQueue

POLICIES = ("due", "car", "fcfs")


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of the waiting requests, and what comes with it."""

    queue: WaitingQueue
    load_ahead: LoadAheadMaker = LoadAhead
    fair_places: bool = False
    """Whether tenants share the places of the batch fairly."""


def make_policy(
    name: str,
    *,
    cache: CacheView,
    predictor: LengthPredictor,
    window: int,
    patience: float,
    scores: bool,
) -> Policy:
    """Return the policy with this name, one of POLICIES. window: number of places in CaR's window. patience: see
    `DueQueue`. scores: whether CaR tells the cache which requests need their KV soon."""
    makers: dict[str, Callable[[], Policy]] = {
        "due": partial(_due, cache, predictor, patience),
        "car": partial(_car, cache, window, scores),
        "fcfs": lambda: Policy(FcfsQueue()),
    }
    if name not in makers:
        raise ValueError(f"unknown scheduling policy {name!r}")
    return makers[name]()


def _due(cache: CacheView, predictor: LengthPredictor, patience: float) -> Policy:
    shares = FairShare(cost=partial(cost_of, cache=cache, predictor=predictor))
    return Policy(DueQueue(cache=cache, shares=shares, patience=patience), fair_places=True)


def _car(cache: CacheView, size: int, scores: bool) -> Policy:
    window = ShuffledWindow(size=size, standings=Standings(cache=cache))
    return Policy(window, partial(TimedLoadAhead, window=window, scores=scores))
