"""Admits a waiting context: gives it pages, and fills the first ones with what is stored of it."""

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.requests.context import RequestContext
from reprise.cache.requests.loading import Loads
from reprise.cache.requests.matching import Matcher
from reprise.cache.requests.parking import Parking
from reprise.cache.requests.siblings import Siblings
from reprise.cache.tiers.hbm import keys_of
from reprise.cache.tiers.hierarchy import Hierarchy


class Placer:
    """An admitter of waiting contexts, for the SchedulerView, on the engine's thread. It finds what is stored of them,
    takes pages, and orders the copies and loads that fill them."""

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        matcher: Matcher,
        siblings: Siblings,
        loads: Loads,
        parking: Parking,
        reuse: bool,
    ) -> None:
        self._tiers = tiers
        self._table, self._pages, self._hbm = tiers.table, tiers.pages, tiers.hbm
        self._matcher = matcher
        self._siblings = siblings
        self._loads, self.parking = loads, parking
        self._reuse = reuse

    def admit(self, context: RequestContext, num_tokens: int) -> int | None:
        """Give a context pages for its stored leading tokens and for `num_tokens` more. Returns the number of leading
        tokens that need no computing; None if there is no room, which changes nothing. Whole pages that match are
        shared. The rest is copied, loaded, or taken over in place if no other request can see it."""
        assert not context.rows.pages, "admitted twice"
        answer = self._matcher.match(context)
        match = answer.chosen
        pages_needed = self._hbm.num_pages(match.num_tokens + num_tokens)
        is_larger, parked = self.parking.needs(len(context.token_ids)), None
        if is_larger:
            parked = self.parking.begin(context, match, pages_needed)
            if parked is None:
                return None
        placement = self._hbm.place(context.rows, match, pages_needed, len(context.token_ids), parked)
        if placement is None and is_larger:
            self.parking.withdraw(context)
        elif placement is None and self._pages.num_pinned == 0:
            # A copied block needs room twice until the copy is made. Nothing runs whose end would free room, so
            # compute such blocks.
            match = self._hbm.usable_in_place(match)
            placement = self._hbm.place(context.rows, match, pages_needed, len(context.token_ids))
        if placement is None:
            return None
        self._matcher.note_passed_over(answer)
        context.reuse.remembered = None  # the lineage may change, and a running context is not matched
        context.sources.by_tier, context.sources.own_tokens = (
            self._matcher.sources(context, match),
            self._matcher.own_tokens(context, match),
        )
        context.sources.coded_tokens = self._matcher.coded_tokens(match)
        context.rows.moved = placement.moved
        for copy in placement.copies:
            self._tiers.orders.add(copy)
        if placement.taken_over is not None:
            taken = self._table.get(placement.taken_over)
            assert taken is not None
            self._hbm.leave(taken)
            if taken.is_nowhere:
                self._table.drop(taken.key)
        rows = [row for row, _ in match.used]
        for key in keys_of(rows, self._table):
            self._tiers.touch(key)
        if not context.lineage.is_held_by(len(match.rows), match.partial is not None):
            context.lineage = context.lineage.anew(len(match.rows))
            context.reuse.lost_lineage = True
        context.rows.is_trusted = True
        context.rows.computed = match.num_tokens
        context.rows.sealed = len(match.rows)
        context.reuse.open_hint = match.partial.key if match.partial is not None else None
        context.reuse.open_place = len(match.rows)
        context.rows.continues_raw = match.partial is not None and (match.partial.kept_raw or not match.partial.is_open)
        if self._reuse:
            prompt_blocks = context.prompt_tokens // BLOCK_TOKENS
            for key in context.chain()[len(match.rows) : prompt_blocks]:
                self._siblings.claim(key, context.request_id)
        if placement.loads:
            self._loads.start(context, placement.loads)
        return match.num_tokens
