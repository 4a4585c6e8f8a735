"""Enters in the table, where other requests find them, the blocks that a running context has computed, while it runs
and when it gives its pages back."""

from array import array

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, is_exact
from reprise.cache.blocks.rows import PARKED
from reprise.cache.blocks.table import BlockRow
from reprise.cache.requests.context import RequestContext
from reprise.cache.requests.loading import Loads
from reprise.cache.requests.parking import Parking
from reprise.cache.requests.running import Requests
from reprise.cache.requests.saving import Saver
from reprise.cache.requests.siblings import Siblings
from reprise.cache.tiers.hierarchy import Hierarchy


class Publisher:
    """A part that enters computed blocks in the table, so that other requests can find them. The Lifecycle and the
    SchedulerView call it, on the engine's thread."""

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

    def publish(self, context: RequestContext) -> None:
        """Enter in the table those blocks of the context that have become full. For blocks that were copied to another
        position in the context, enter their new page."""
        for block, (key, page) in context.rows.moved.items():
            self._hbm.settle(key, page, block * BLOCK_TOKENS % self._page_size, block * BLOCK_TOKENS, hop=True)
        context.rows.moved = {}
        full = context.rows.computed // BLOCK_TOKENS
        keys = context.chain()
        for block in range(context.rows.sealed, full):
            key = keys[block]
            self._siblings.settle(key, context.request_id)
            self._publish_full(context, block)
        context.rows.sealed = full

    def _publish_full(self, context: RequestContext, block: int) -> None:
        """Enter a full block in the table, so that other requests can find it, and mark its slot in DRAM as
        complete."""
        first = block * BLOCK_TOKENS
        key = context.keys[block]
        row = self._row(context, block, key, context.token_ids[first : first + BLOCK_TOKENS], session_id=None)
        if context.rows.is_trusted:
            self._publish(context, row)
            self._replace_unreadable(context, key)
        self._saver.seal(context, block, row if context.rows.is_trusted else None, BLOCK_TOKENS)

    def _row(
        self, context: RequestContext, block: int, key: BlockKey, tokens: list[int], session_id: str | None
    ) -> BlockRow:
        """Return the table row of a block that a running context has computed, or has copied to another place after a
        truncation."""
        first, lineage = block * BLOCK_TOKENS, context.lineage
        parent = lineage.parent(block)
        if lineage.is_moved(block):
            # Contexts that begin like this one but never had what was cut must not find it, not even its first rows. No
            # block chains on this key, so it is found under its own alone.
            parent = context.domain.child(key, ())
        return BlockRow(
            key=key,
            parent=parent,
            token_ids=array("I", tokens),
            size_bytes=len(tokens) * self._hbm.bytes_per_token,
            session_id=session_id,
            page=context.rows.pages[first // self._page_size],
            offset=first % self._page_size,
            position=first,
            place=block,
            kept_raw=(
                parent == context.domain.root
                or is_exact(context.session[1])
                or block < context.reuse.open_place  # it was not computed for this context
                or (block == context.reuse.open_place and context.rows.continues_raw)
                or lineage.is_moved(block)
            ),
            owners=(context.session,),
        )

    def _replace_unreadable(self, context: RequestContext, key: BlockKey) -> None:
        """Drop the disk's copy of a block that could not be read, after the block was computed, so that it is written
        again. Otherwise a bad sector would cost every later turn the same."""
        known = self._table.get(key)
        if context.reuse.unread.get(key) == "io" and known is not None and not known.in_dram:
            del context.reuse.unread[key]
            self._tiers.disk.drop(known)

    def _publish(self, context: RequestContext, row: BlockRow) -> None:
        context.rows.published[row.key] = None
        self._hbm.publish(row)

    def release(self, context: RequestContext) -> BlockKey | None:
        """Unpin a context's pages, keep its blocks in the table, including the open one, and record in every tier that
        they were used, from tail to head. Returns the open block's key."""
        open_key = None
        lacks_rows = self._loads.release(context)
        if self._reuse:
            self._siblings.give_up(context)
        if self._reuse and not lacks_rows:
            full, rows = divmod(context.rows.computed, BLOCK_TOKENS)
            tokens = context.token_ids[full * BLOCK_TOKENS : context.rows.computed]
            if rows and full == context.rows.sealed:
                open_key = context.domain.open_block(context.lineage.parent(full), tokens, context.session_id)
                row = self._row(context, full, open_key, tokens, context.session_id)
                if context.rows.is_trusted:
                    self._publish(context, row)
                self._saver.seal(context, full, row if context.rows.is_trusted else None, rows)
            for block in reversed(range(full)):
                known = self._table.get(context.keys[block])
                is_parked = context.rows.pages[block * BLOCK_TOKENS // self._page_size] == PARKED
                if not is_parked and (known is None or known.page is None):
                    # The copy that was found under this key has left HBM. Without this one, those after it are lost.
                    self._publish_full(context, block)
                if context.keys[block] in self._table:
                    self._tiers.touch(context.keys[block])
            for block in range(full):
                self._saver.save_late(context, block)  # from the head on, so that what is saved is a prefix
        self._saver.abandon(context)
        context.rows.moved = {}
        self._let_go(context)
        return open_key

    def _let_go(self, context: RequestContext) -> None:
        for page in context.rows.pages:
            if page != PARKED:
                self._pages.unpin(page)
        self._parking.leave(context)

    def preempt(self, context: RequestContext) -> None:
        """Take the pages from a request and keep its computed blocks in the table, including the open one. If it is
        resumed soon, it computes nothing again."""
        context.reuse.open_hint, context.reuse.open_place = self.release(context), context.rows.computed // BLOCK_TOKENS
        context.rows.reached = max(context.rows.reached, context.rows.computed)
        context.rows.give_back()
        self._running.gave_way()

    def void(self, context: RequestContext) -> None:
        """Take the pages from a request whose load has failed or takes too long, and enter no more of its blocks in the
        table."""
        context.rows.computed = context.rows.sealed * BLOCK_TOKENS
        self._siblings.give_up(context)
        self._loads.outlive(context)
        self._saver.abandon(context)
        self._let_go(context)
        context.rows.moved = {}
        context.rows.give_back()
        self._running.gave_way()
