"""Makes what a running context has computed findable, while it runs and when it gives its pages back."""

from cache.blocks.context import PARKED, RunningContext
from cache.blocks.keys import BLOCK_TOKENS, BlockKey
from cache.blocks.table import BlockRow
from cache.requests.loading import Loads
from cache.requests.parking import Parking
from cache.requests.running import Requests
from cache.requests.saving import Saver
from cache.requests.siblings import Siblings
from cache.tiers.hierarchy import Hierarchy


class Publisher:
    """Single-threaded, part of the CacheManager."""

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        running: Requests,
        siblings: Siblings,
        saver: Saver,
        loads: Loads,
        parking: Parking,
        reuse: bool,
    ) -> None:
        self._tiers = tiers
        self._running = running
        self._table, self._pages, self._hbm = tiers.table, tiers.pages, tiers.hbm
        self._siblings = siblings
        self._saver = saver
        self._loads, self._parking = loads, parking
        self._page_size = tiers.hbm.page_size
        self._reuse = reuse

    def publish(self, context: RunningContext) -> None:
        """Make blocks that are full now findable, and those that were copied findable where they are now."""
        for block, (key, page) in context.published.items():
            self._hbm.settle(key, page, block * BLOCK_TOKENS % self._page_size, block * BLOCK_TOKENS, hop=True)
        context.published = {}
        full = context.computed // BLOCK_TOKENS
        keys = context.chain()
        for block in range(context.sealed, full):
            key = keys[block]
            self._siblings.settle(key, context.request_id)
            self._publish_full(context, block)
        context.sealed = full

    def _publish_full(self, context: RunningContext, block: int) -> None:
        """Make a full block findable, and seal the slot it was saved to."""
        first = block * BLOCK_TOKENS
        key = context.keys[block]
        row = self._hbm.row(context, block, key, context.token_ids[first : first + BLOCK_TOKENS], session_id=None)
        if context.trusted:
            self._publish(context, row)
            self._replace_unreadable(context, key)
        self._saver.seal(context, block, row if context.trusted else None, BLOCK_TOKENS)

    def _replace_unreadable(self, context: RunningContext, key: BlockKey) -> None:
        """A block whose copy the disk could not read has been computed. It is written anew, or a bad sector would cost
        every later turn the same."""
        known = self._table.get(key)
        if context.unread.get(key) == "io" and known is not None and not known.in_dram:
            del context.unread[key]
            self._tiers.disk.drop(known)

    def _publish(self, context: RunningContext, row: BlockRow) -> None:
        context.owned[row.key] = None
        self._hbm.publish(row)

    def release(self, context: RunningContext) -> BlockKey | None:
        """Unpin a context's pages, keep its blocks findable, the open one too, and touch them from tail to head.
        Returns the open block's key."""
        open_key = None
        loading = self._loads.leave(context)
        if self._reuse:
            self._siblings.give_up(context)
        if self._reuse and not loading:
            full, rows = divmod(context.computed, BLOCK_TOKENS)
            tokens = context.token_ids[full * BLOCK_TOKENS : context.computed]
            if rows and full == context.sealed:
                open_key = context.domain.open_block(context.lineage.parent(full), tokens, context.session_id)
                row = self._hbm.row(context, full, open_key, tokens, context.session_id)
                if context.trusted:
                    self._publish(context, row)
                self._saver.seal(context, full, row if context.trusted else None, rows)
            for block in reversed(range(full)):
                known = self._table.get(context.keys[block])
                here = known is not None and block * BLOCK_TOKENS == self._hbm.position_of(known, block)
                is_parked = context.pages[block * BLOCK_TOKENS // self._page_size] == PARKED
                if not is_parked and (known is None or (known.page is None and here)):
                    # The copy that was found under this key has left HBM. Without this one, those after it are lost.
                    self._publish_full(context, block)
                if context.keys[block] in self._table:
                    self._tiers.touch(context.keys[block])
            for block in range(full):
                self._saver.save_late(context, block)  # from the head on, so that what is saved is a prefix
        self._saver.abandon(context)
        context.published, context.job = {}, None
        self._let_go(context)
        return open_key

    def _let_go(self, context: RunningContext) -> None:
        for page in context.pages:
            if page != PARKED:
                self._pages.unpin(page)
        self._parking.leave(context)

    def preempt(self, context: RunningContext) -> None:
        """Give a request's room back and keep what it computed findable, its open block too: if it is resumed early it
        computes nothing again."""
        context.open_hint, context.open_place = self.release(context), context.computed // BLOCK_TOKENS
        context.reached = max(context.reached, context.computed)
        context.pages, context.computed, context.sealed = [], 0, 0
        self._running.gave_way()

    def void(self, context: RunningContext) -> None:
        """Give a request's room back and publish nothing of it: its load has failed, or takes too long."""
        context.computed = context.sealed * BLOCK_TOKENS
        self._siblings.give_up(context)
        self._loads.outlive(context)
        self._saver.abandon(context)
        self._let_go(context)
        context.published, context.job = {}, None
        context.pages, context.computed, context.sealed = [], 0, 0
        self._running.gave_way()
