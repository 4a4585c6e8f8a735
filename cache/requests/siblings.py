"""Lets many requests wait for one computation or load of a block that they share."""

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.requests.context import RequestContext
from reprise.cache.tiers.hierarchy import Hierarchy


class Siblings:
    """A record of which request computes or loads which block, so that others wait for the block instead of computing
    it again. The Placer and Loads enter blocks, the SchedulerView asks, all on the engine's thread."""

    def __init__(self, *, tiers: Hierarchy) -> None:
        self.coming: dict[BlockKey, str] = {}  # blocks being computed or loaded -> the request that does it
        self._table, self._hbm, self._saves, self._fetches = tiers.table, tiers.hbm, tiers.dram.saves, tiers.fetches

    def claim(self, key: BlockKey, request_id: str) -> None:
        """Note that a request is about to compute or load a block, so that others wait for it. Does nothing if another
        request has claimed the block before."""
        self.coming.setdefault(key, request_id)

    def settle(self, key: BlockKey, request_id: str) -> None:
        """End a request's claim of a block, because it has computed or loaded the block, or never will: then no other
        request waits for it any more. Ignores claims of other requests."""
        if self.coming.get(key) == request_id:
            del self.coming[key]

    def give_up(self, context: RequestContext) -> None:
        """End all claims of a request, because it will not compute or load any more blocks: others stop waiting for
        it."""
        for key in context.chain():
            self.settle(key, context.request_id)

    def waits(self, context: RequestContext) -> bool:
        """Return whether the next block that a request needs is on its way: another request computes or loads it, or it
        is being fetched into DRAM or saved there."""
        if context.waiting.block is not None and self._is_coming(context.waiting.block, context):
            return True  # asked of every waiter in every step: do not walk the prompt again for nothing
        context.waiting.block = None
        coming, row_of = self.coming, self._table.get
        is_saving, is_fetching = self._saves.is_saving, self._fetches.is_fetching
        for block, key in enumerate(context.chain()):
            row = row_of(key)
            # Runs for every block of the next requests in line, in every step, and few of these blocks are coming.
            if (
                (key in coming or is_saving(key) or is_fetching(key))
                and self._is_coming(key, context)
                and (row is None or not self._hbm.is_ready(row, block))
            ):
                context.waiting.block = key
                return True
            if row is None:
                return False
        return False

    def _is_coming(self, key: BlockKey, context: RequestContext) -> bool:
        if self.coming.get(key, context.request_id) != context.request_id:
            return True
        if self._fetches.is_fetching(key):
            return not context.reuse.skips_disk
        row = self._table.get(key)
        # Moving keys that are being saved would cost them a rounding, or a computation; the save ends in milliseconds.
        return row is not None and not row.is_saved and self._saves.is_saving(key) and row.page is None
