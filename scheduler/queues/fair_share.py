"""Orders waiting requests so that tenants get equal shares, however many requests each of them sends."""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from reprise.scheduler.line import Line
from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.sequence import Sequence

_PER_STEP = 128  # requests in line for each step that their order may be out of date

Cost = Callable[[Sequence], float]
"""Returns the tokens that a request takes of its tenant's share: an expectation while it waits, the true count once it
has ended."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: Sequence
    number: int  # counts arrivals
    cost: float  # tokens over the weight of the request
    place: float  # the key by which the requests of its tenant are ordered


@dataclass(slots=True)
class _Tenant:
    served: float = 0.0  # its virtual clock, which is the virtual start of its next request
    waiting: list[tuple[float, int, _Waiting]] = field(default_factory=list)
    starts: list[tuple[float, int, Sequence]] | None = None  # virtual start times of `waiting`; None: not yet computed


class FairShare:
    """A start-time fair queue over tenants: tenants that have requests waiting get equal shares of the tokens that the
    model computes.

    Each tenant has a virtual clock, in weighted tokens. When one of its requests starts, this clock advances by the
    request's cost divided by its weight. The cost is first the expected number of tokens, and is corrected when the
    request has ended. A request's virtual start is what its tenant's clock will show once that tenant's requests before
    it have started. The request with the earliest virtual start goes first. Within a tenant, requests start in
    ascending order of `place`, a number that the caller gives each.

    A common clock shows the earliest virtual start that there was when a request last started; it never goes back,
    except that all clocks begin again at 0 when no request waits or runs. A tenant that had no requests waiting and
    gets one has its clock set forward to the common clock, if it shows less. So a tenant saves up no claim while it has
    no requests, and a request of a tenant that comes seldom starts soon.

    Adding or removing a request costs time for its tenant's requests alone. `first` is always exact. `upcoming` sorts
    the requests of all tenants after a change. If the change was only a new `place` or a corrected cost, and 128 or
    more requests wait, it may return the earlier order for some more steps (one for each 128 requests).
    """

    def __init__(self, *, cost: Cost) -> None:
        self._cost = cost
        self._now = 0.0  # the common clock: the earliest virtual start when a request last started
        self._arrivals = 0
        self._tenants: dict[str, _Tenant] = {}
        self._entries: dict[Sequence, _Waiting] = {}
        self._charged: dict[Sequence, float] = {}  # requests that have started and have not ended
        self._line: Line[Sequence] = Line()
        self._is_current = True  # whether `_line` is right but for corrected clocks
        self._outdated = 0  # steps since a clock was corrected that the line does not know of; 0: none was

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence, place: float) -> None:
        """Add a request that has arrived. place: the key by which its tenant's requests start, ascending (`DueQueue`
        passes the time at which it is due); equal ones start in order of arrival."""
        self._arrivals += 1
        tenant = self._tenants.setdefault(sequence.tenant, _Tenant())
        if not tenant.waiting:
            tenant.served = max(tenant.served, self._now)
        cost = max(1.0, self._cost(sequence)) / sequence.weight
        self._enter(_Waiting(sequence, self._arrivals, cost, place))
        self._is_current = False

    def move(self, sequence: Sequence, place: float) -> None:
        """Change a waiting request's `place`, the key by which its tenant's requests start. If 128 or more requests
        wait, `upcoming` may return the order before this change for some more steps."""
        entry = self._entries[sequence]
        self._leave(entry)
        self._enter(replace(entry, place=place))
        self._is_current, self._outdated = self._may_wait(), max(1, self._outdated)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting request that was cancelled. Raises KeyError if it does not wait."""
        self._leave(self._entries.pop(sequence))
        self._settle(sequence.tenant, 0.0)

    def take(self, sequence: Sequence) -> None:
        """Remove a request because it starts, and advance its tenant's virtual clock by the expected cost."""
        entry = self._entries.pop(sequence)
        # A request that starts out of turn does not move the common time past those that wait for theirs.
        self._now = max(self._now, min(tenant.served for tenant in self._tenants.values() if tenant.waiting))
        tenant, was_current = self._tenants[sequence.tenant], self._is_current
        is_first = tenant.waiting[0][2] is entry
        starts = tenant.starts[1:] if tenant.starts is not None and is_first else None
        self._leave(entry)
        self._charged[sequence] = entry.cost
        self._settle(sequence.tenant, entry.cost)
        tenant.starts = starts
        if was_current and (starts is not None or self._outdated):
            # Its tenant's others start when they would have started: nothing moves.
            order = self._line.members
            index = order.index(sequence)
            self._line, self._is_current = self._line.followed_by(order[:index] + order[index + 1 :]), True

    def finished(self, sequence: Sequence) -> None:
        """Correct the virtual clock of a request's tenant: replace the cost that `take` expected by the true one,
        because the request has ended. Ignores requests that never started."""
        charged, was_current = self._charged.pop(sequence, None), self._is_current
        if charged is not None:
            self._settle(sequence.tenant, max(1.0, self._cost(sequence)) / sequence.weight - charged)
            if was_current and len(self._entries) >= _PER_STEP:
                self._is_current, self._outdated = True, max(1, self._outdated)

    def first(self) -> Sequence | None:
        """Return the request that starts next; None if no request waits."""
        tenants = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not tenants:
            return None
        # Numbers are unique, so requests are not compared.
        return min((tenant.served, *tenant.waiting[0][1:]) for tenant in tenants)[2].sequence

    def upcoming(self) -> Line[Sequence]:
        """Return the waiting requests in the order in which they would start if no other came and no cost were
        corrected. The order may be some steps old, as the class says."""
        if not self._is_current:
            starts: list[tuple[float, int, Sequence]] = []
            for tenant in self._tenants.values():
                starts += self._starts(tenant)
            starts.sort()  # sorted runs, one of each tenant; numbers are unique, so sequences are not compared
            self._line = self._line.followed_by(tuple([sequence for _, _, sequence in starts]))
            self._is_current, self._outdated = True, 0
        return self._line

    def refresh(self) -> None:
        if self._outdated:
            self._outdated += 1
            if self._outdated > len(self._entries) // _PER_STEP:
                self._is_current = False

    def _may_wait(self) -> bool:
        """Return whether the line, if it is current, may be used for some more steps although its order has changed."""
        return self._is_current and len(self._entries) >= _PER_STEP

    def _starts(self, tenant: _Tenant) -> list[tuple[float, int, Sequence]]:
        """Return (virtual start, arrival number, request) of each waiting request of a tenant. The virtual start, in
        weighted tokens, is the tenant's clock plus the costs of the tenant's requests ahead of it."""
        if tenant.starts is None:
            begin, tenant.starts = tenant.served, []
            for _, number, entry in tenant.waiting:
                tenant.starts.append((begin, number, entry.sequence))
                begin += entry.cost
        return tenant.starts

    def _enter(self, entry: _Waiting) -> None:
        self._entries[entry.sequence] = entry
        tenant = self._tenants[entry.sequence.tenant]
        insort(tenant.waiting, (entry.place, entry.number, entry))
        tenant.starts = None

    def _leave(self, entry: _Waiting) -> None:
        waiting = self._tenants[entry.sequence.tenant].waiting
        del waiting[bisect_left(waiting, (entry.place, entry.number))]

    def _settle(self, name: str, cost: float) -> None:
        """Advance a tenant's virtual clock (the weighted tokens it was charged) by `cost`, which may be negative, and
        mark the order over all tenants as changed."""
        if not (self._entries or self._charged):
            self._tenants, self._now, self._is_current = {}, 0.0, False  # no tenant is ahead of another
            return
        tenant = self._tenants[name]
        tenant.served = max(tenant.served + cost, self._now)
        tenant.starts, self._is_current = None, False


def cost_of(sequence: Sequence, cache: CacheView, predictor: LengthPredictor) -> float:
    """Return the tokens that a request makes the model compute: an expectation before it has run, the true count
    afterwards."""
    if sequence.scheduled_s is None:
        return cache.residency(sequence.request_id).missing_tokens + predictor.predict(sequence)
    return sequence.prompt_tokens - sequence.cached_tokens + sequence.output_tokens
