"""The orders in which requests may start, by the name that settings give them."""

from scheduler.fair_share import FairShare
from scheduler.ports import CacheView
from scheduler.predictor import LengthPredictor
from scheduler.priority import PriorityQueue, Standings
from scheduler.queues import FcfsQueue, WaitingQueue
from scheduler.sequence import Sequence
from scheduler.window import EntryOrder, ShuffledWindow


def make_queue(
    policy: str,
    *,
    cache: CacheView,
    predictor: LengthPredictor,
    window: int,
    class_ordered_entry: bool,
    hidden_s: float,
) -> WaitingQueue:
    """policy: car | priority | fcfs. window, class_ordered_entry: of `car` alone. hidden_s: a load that holds up its
    step no longer is no load."""
    match policy:
        case "fcfs":
            return FcfsQueue()
        case "priority":
            return PriorityQueue(standings=Standings(cache=cache, hidden_s=hidden_s))
        case "car":
            entry: EntryOrder
            if class_ordered_entry:
                entry = PriorityQueue(standings=Standings(cache=cache, hidden_s=hidden_s))
            else:
                entry = FairShare(cost=lambda sequence: cost(sequence, cache, predictor))
            return ShuffledWindow(size=window, entry=entry, standings=Standings(cache=cache, hidden_s=hidden_s))
        case _:
            raise ValueError(f"unknown scheduling policy {policy!r}")


def cost(sequence: Sequence, cache: CacheView, predictor: LengthPredictor) -> float:
    """Tokens that a request makes the model compute: expected while it has not run, what it was afterwards."""
    if sequence.scheduled_s is None:
        return cache.residency(sequence.request_id).missing_tokens + predictor.predict(sequence)
    return sequence.prompt_tokens - sequence.cached_tokens + sequence.output_tokens
