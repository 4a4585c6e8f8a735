"""Defines what a policy is: an order of the waiting requests, and what comes with it."""

from dataclasses import dataclass

from reprise.scheduler.load_ahead import LoadAheadMaker
from reprise.scheduler.queues.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduling policy: the order of the waiting requests, and the choices that belong to it.
    `reprise.scheduler.make_policy` makes it by its name."""

    queue: WaitingQueue
    """The order in which waiting requests start."""
    load_ahead: LoadAheadMaker
    """Makes the starter of early loads, which decides when the loads of waiting requests begin."""
    fair_places: bool
    """Whether tenants share the places of the batch fairly."""
