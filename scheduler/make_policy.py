"""Makes the policy that `scheduler.policy` names. This is the only place that knows all policies:

- `due`, the default: the request that is due first by its work and its wait, with fair shares between tenants
- `car`: the order of the paper CaR, from the wing `reprise.scheduler.car`
- `fcfs`: the order of arrival, the baseline

To add a policy, write a `WaitingQueue` and name it here and in `SchedulerSettings.policy`.
"""

from functools import partial

from reprise.scheduler.car.timed_loads import TimedLoadAhead
from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.load_ahead import LoadAhead
from reprise.scheduler.policy import Policy
from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.queues.due import DueQueue
from reprise.scheduler.queues.fair_share import FairShare, cost_of
from reprise.scheduler.queues.waiting_queue import FcfsQueue

POLICIES = ("due", "car", "fcfs")


def make_policy(
    name: str, *, cache: CacheView, predictor: LengthPredictor, patience: float, window: int, scores: bool
) -> Policy:
    """Return the policy with this name, one of POLICIES. patience: for `due`, how many seconds of waiting a second of
    work is worth. window: for `car`, how many requests its window has. scores: whether `car` tells the cache which
    requests need their KV soon. Raises ValueError if no policy has this name."""
    if name == "due":
        shares = FairShare(cost=partial(cost_of, cache=cache, predictor=predictor))
        queue = DueQueue(cache=cache, shares=shares, patience=patience)
        return Policy(queue=queue, load_ahead=LoadAhead, fair_places=True)
    if name == "car":
        shuffled = ShuffledWindow(size=window, cache=cache)
        timed = partial(TimedLoadAhead, window=shuffled, scores=scores)
        return Policy(queue=shuffled, load_ahead=timed, fair_places=False)
    if name == "fcfs":
        return Policy(queue=FcfsQueue(), load_ahead=LoadAhead, fair_places=False)
    raise ValueError(f"unknown scheduling policy {name!r}")
