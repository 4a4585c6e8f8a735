"""Tells the scheduler what the cache has of each request, and gives requests their room."""

from reprise.cache.requests.loading import Loads
from reprise.cache.requests.matching import Matcher
from reprise.cache.requests.placing import Placer
from reprise.cache.requests.publishing import Publisher
from reprise.cache.requests.running import Requests
from reprise.cache.requests.siblings import Siblings
from reprise.cache.stats import ResidencyValue
from reprise.cache.tiers.hierarchy import Hierarchy


class SchedulerView:
    """The cache as the scheduler sees it, on the engine's thread. Implements `reprise.scheduler.ports.CacheView`, which
    explains each method."""

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        running: Requests,
        matcher: Matcher,
        siblings: Siblings,
        loads: Loads,
        placer: Placer,
        publisher: Publisher,
        reuse: bool,
    ) -> None:
        self._hbm, self._scores = tiers.hbm, tiers.scores
        self._running = running
        self._matcher, self._siblings, self._loads = matcher, siblings, loads
        self._placer, self._publisher, self._parking = placer, publisher, placer.parking
        self._reuse = reuse

    # --- what is there ------------------------------------------------------------------------------------------------

    def resident_tokens(self, request_id: str) -> int:
        return self._matcher.match(self._running[request_id]).chosen.num_tokens

    def residency(self, request_id: str) -> ResidencyValue:
        context = self._running[request_id]
        if context.rows.pages:
            return self._matcher.on_the_way(context, self._loads.to_come(context), self._loads.stall_s(context))
        return self._matcher.residency(context)

    def waits_for_sibling(self, request_id: str, *, is_due: bool) -> bool:
        """Return whether the request waits for a block that another request computes or loads or that is being fetched,
        or for the end of its own load that was late. is_due: whether its turn has come, so that it waits no longer for
        a late fetch."""
        context = self._running[request_id]
        if not self._reuse:
            return False
        if self._loads.is_outlived(context):
            return True
        if is_due:
            self._parking.fetch(context)
        if not self._siblings.waits(context):
            return False
        return not (is_due and self._loads.is_fetch_late(context)) or self._siblings.waits(context)

    def stall_s(self, request_id: str) -> float:
        return self._loads.stall_s(self._running[request_id])

    def stalls_s(self) -> dict[str, float]:
        return self._loads.stalls_s() if self._loads.under_way else {}

    # --- room ---------------------------------------------------------------------------------------------------------

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """Give a request pages for its stored leading tokens and for `num_tokens` more, as `Placer.admit` does."""
        return self._placer.admit(self._running[request_id], num_tokens)

    def grow(self, request_id: str, num_tokens: int) -> int:
        context = self._running[request_id]
        rows = context.rows
        if self._parking.is_on and self._parking.concerns(context, num_tokens):
            has_room = self._parking.grow(context, num_tokens)
        else:
            has_room = self._hbm.grow(rows, num_tokens)
        return len(rows.pages) * self._hbm.page_size - rows.computed if has_room else 0

    def room_is_coming(self) -> bool:
        return self._loads.frees_room() or self._parking.waits

    def expect(self, request_id: str, score: int) -> None:
        context = self._running[request_id]
        hint = context.reuse.open_hint
        self._scores.set(request_id, score, [*context.chain(), *([hint] if hint is not None else [])] if score else [])

    def preempt(self, request_id: str) -> None:
        self._publisher.preempt(self._running[request_id])

    def withdraw(self, request_id: str) -> None:
        context = self._running[request_id]
        before = context.rows.reached, context.reuse.open_hint, context.reuse.open_place
        self._publisher.preempt(context)
        context.rows.reached, context.reuse.open_hint, context.reuse.open_place = before
