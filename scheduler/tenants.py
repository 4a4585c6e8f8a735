"""Tenants: which of them run, wait and have come lately, and whose turn it is by that."""

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many

from reprise.scheduler.queues.waiting_queue import WaitingQueue
from reprise.scheduler.sequence import Sequence

_LATELY_S = 10.0  # a tenant that came in these seconds may come again at any moment


class _OfTenants:
    """The sequences of some tenants, as a container."""

    def __init__(self, tenants: Collection[str]) -> None:
        self._tenants = tenants

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence.tenant in self._tenants


class Tenants:
    """Counts sequences by tenant. Without fair places no tenant is starved and none comes before another: all are
    treated as one. Pure, single-threaded."""

    def __init__(self, *, fair_places: bool) -> None:
        self._fair_places = fair_places
        self._arrivals: list[tuple[str, float]] = []  # the two tenants that came last, and when; the later one last
        self._running: Counter[str] = Counter()  # tenant -> how many, at least one
        self._present: Counter[str] = Counter()  # the same, waiting ones included

    # --- events -------------------------------------------------------------------------------------------------------

    def arrived(self, sequence: Sequence) -> None:
        """It waits."""
        others = [arrival for arrival in self._arrivals if arrival[0] != sequence.tenant]
        self._arrivals = [*others[-1:], (sequence.tenant, sequence.arrived_s)]
        self._present[sequence.tenant] += 1

    def started(self, sequence: Sequence) -> None:
        """It runs."""
        self._running[sequence.tenant] += 1

    def stopped(self, sequence: Sequence) -> None:
        """It runs no more."""
        _take_one(self._running, sequence.tenant)

    def left(self, sequence: Sequence) -> None:
        """It neither runs nor waits any more."""
        _take_one(self._present, sequence.tenant)

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    @property
    def most_running(self) -> int:
        """The most sequences that one tenant has running."""
        return max(self._running.values(), default=0)

    def has_others_running(self, sequence: Sequence) -> bool:
        """Whether more than one of its tenant's run, itself among them."""
        return self._running[sequence.tenant] > 1

    def several(self, now: float) -> bool:
        """Whether places are shared, and a tenant has come lately beside the one that runs."""
        if not self._fair_places:
            return False
        lately = {tenant for tenant, arrived_s in self._arrivals if now - arrived_s < _LATELY_S}
        return len(lately.union(self._running)) > 1

    def least_to_do_first(self, sequences: list[Sequence]) -> list[Sequence]:
        """Sort by how much their tenants have, stable among those whose tenants have equally many."""
        if not self._fair_places:
            return sequences
        return sorted(sequences, key=lambda s: (self._running[s.tenant], self._present[s.tenant]))

    def to_give_way(self, running: Many[Sequence]) -> Sequence:
        """Return the latest arrival; with fair places, of the tenants with the most running. So the earliest of all is
        never chosen before the others, and gets on."""
        if self._fair_places:
            most = self.most_running
            running = [sequence for sequence in running if self._running[sequence.tenant] == most]
        return max(running, key=lambda s: (s.arrived_s, s.request_id))

    def starved(self, queue: WaitingQueue, before_it: Iterable[Sequence], has_places: bool) -> Sequence | None:
        """Return the next in the queue of a tenant that has nothing running and nothing before the queue, while another
        tenant has all that there is to give, and more than one request to spend it on. A tenant with one request keeps
        its place, but not the steps."""
        if not self._fair_places or self._present.keys() <= self._running.keys():
            return None  # asked several times a step: no need to look at the queue
        if max((self._present[tenant] for tenant in self._running), default=0) < 2:
            return None
        if not has_places and self.most_running < 2:
            return None
        served = {*self._running, *(sequence.tenant for sequence in before_it)}
        if self._present.keys() <= served:
            return None
        starved = queue.best(_OfTenants(served))
        if starved is None and any(sequence.tenant not in served for sequence in queue.near() or ()):
            # It would be overtaken once too often: it goes first, and not only when a place is free.
            return queue.waited_for()
        return starved


def _take_one(counter: Counter[str], tenant: str) -> None:
    counter[tenant] -= 1
    if counter[tenant] <= 0:
        del counter[tenant]
