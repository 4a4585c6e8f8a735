"""Counts which tenants run, wait and have sent requests lately, and decides by that whose turn it is."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many

from reprise.scheduler.queues.waiting_queue import WaitingQueue
from reprise.scheduler.sequence import Sequence

_LATELY_S = 10.0  # a tenant that came in these seconds may come again at any moment


class Tenants:
    """A count of sequences by tenant. A tenant is starved if it has requests but nothing running, while another tenant
    holds all places in the batch, all room in HBM or all of the steps' budget. Without `fair_places` no tenant counts
    as starved or is preferred to another. Pure, single-threaded."""

    def __init__(self, *, fair_places: bool) -> None:
        self._fair_places = fair_places
        self._arrivals: list[tuple[str, float]] = []  # the two tenants that came last, and when; the later one last
        self._running: Counter[str] = Counter()  # tenant -> how many of its sequences run, at least one
        self._present: Counter[str] = Counter()  # tenant -> how many sequences it has running or waiting

    # --- events -------------------------------------------------------------------------------------------------------

    def arrived(self, sequence: Sequence) -> None:
        """Count a sequence that has arrived among those that its tenant has running or waiting."""
        others = [arrival for arrival in self._arrivals if arrival[0] != sequence.tenant]
        self._arrivals = [*others[-1:], (sequence.tenant, sequence.arrived_s)]
        self._present[sequence.tenant] += 1

    def started(self, sequence: Sequence) -> None:
        """Count a sequence that starts to run."""
        self._running[sequence.tenant] += 1

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence that has stopped running, whether it ended or was preempted."""
        _take_one(self._running, sequence.tenant)

    def left(self, sequence: Sequence) -> None:
        """Deduct a sequence that has ended or was aborted from the number that its tenant has running or waiting."""
        _take_one(self._present, sequence.tenant)

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    @property
    def most_running(self) -> int:
        """The largest number of sequences that any one tenant has running."""
        return max(self._running.values(), default=0)

    def has_others_running(self, sequence: Sequence) -> bool:
        """Return whether the sequence's tenant has more than one sequence running."""
        return self._running[sequence.tenant] > 1

    def several(self, now: float) -> bool:
        """Return whether more than one tenant has a sequence running or has sent one in the last 10 seconds. Always
        False without `fair_places`."""
        if not self._fair_places:
            return False
        lately = {tenant for tenant, arrived_s in self._arrivals if now - arrived_s < _LATELY_S}
        return len(lately.union(self._running)) > 1

    def least_to_do_first(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the sequences, those of tenants with the fewest running sequences first; between equals, those of
        tenants with the fewest running or waiting ones. Other ties keep their order, as do all sequences without
        `fair_places`."""
        if not self._fair_places:
            return sequences
        return sorted(sequences, key=lambda s: (self._running[s.tenant], self._present[s.tenant]))

    def to_give_way(self, running: Many[Sequence]) -> Sequence:
        """Return the running sequence to preempt: the latest arrival; with `fair_places`, only among the tenants with
        the most running. So the earliest sequence of all is chosen last and always makes progress."""
        if self._fair_places:
            most = self.most_running
            running = [sequence for sequence in running if self._running[sequence.tenant] == most]
        return max(running, key=lambda s: (s.arrived_s, s.request_id))

    def starved(self, queue: WaitingQueue, before_it: Iterable[Sequence], has_places: bool) -> Sequence | None:
        """Return the next queued request of a starved tenant, or None. A tenant is starved if it has nothing running
        and nothing in `before_it` (sequences that start before the queue), while another tenant with several requests
        holds all places in the batch, HBM or the steps' budget. A tenant with a single request running keeps its place
        in the batch, but may have to share HBM and the steps. has_places: whether places in the batch are free."""
        if not self._fair_places or self._present.keys() <= self._running.keys():
            return None  # asked several times a step: no need to look at the queue
        if max((self._present[tenant] for tenant in self._running), default=0) < 2:
            return None
        if not has_places and self.most_running < 2:
            return None
        served = {*self._running, *(sequence.tenant for sequence in before_it)}
        if self._present.keys() <= served:
            return None
        return next((sequence for sequence in queue.upcoming().members if sequence.tenant not in served), None)


def _take_one(counter: Counter[str], tenant: str) -> None:
    counter[tenant] -= 1
    if counter[tenant] <= 0:
        del counter[tenant]
