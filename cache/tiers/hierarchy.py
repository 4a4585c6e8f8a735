"""Hierarchy: the tiers of a block side by side, for what is done in all of them at once. Part of the CacheManager."""

from cache.blocks.keys import BlockKey
from cache.blocks.table import BlockRow, CacheTable, SessionName
from cache.returns.regulars import Regulars
from cache.returns.return_times import ReturnTimes
from cache.returns.succession import Succession
from cache.tiers.dram import DramTier
from cache.tiers.hbm import HbmPool
from cache.tiers.pages import PageAllocator


class Hierarchy:
    """Single-threaded."""

    def __init__(
        self, *, table: CacheTable, pages: PageAllocator, hbm: HbmPool, lower: DramTier, returns: ReturnTimes
    ) -> None:
        self.table, self.pages, self.hbm, self.lower = table, pages, hbm, lower
        self.policies = (hbm.policy, lower.dram_policy, lower.disk_policy)
        self.returns = returns  # what these go by
        self.regulars = Regulars()
        self.succession = Succession()

    def used(self, name: SessionName, now: float, num_tokens: int | None = None) -> None:
        """A turn of a session arrived with a prompt of so many tokens; None: it soon will, or did before a restart."""
        self.regulars.used(name, now)
        if num_tokens is not None:
            self.succession.came(name)
        self.returns.used(name, now, num_tokens)

    def answered(self, name: SessionName, now: float, num_tokens: int) -> None:
        """A turn of a session is over, so many tokens into its context."""
        self.returns.answered(name, now, num_tokens)

    def forget_session(self, name: SessionName) -> None:
        """A name that no block goes by any more."""
        self.regulars.forget(name)
        self.succession.forget(name)
        for policy in self.policies:
            policy.forget(name)
        self.returns.forget(name)

    def own(self, row: BlockRow, name: SessionName, place: int) -> None:
        """A block stands in a session's context, behind `place` others."""
        if name not in row.owners:
            row.owners = (*row.owners, name)
        row.place = place
        for policy in self.policies:
            policy.own(row.key, name, place)

    def touch(self, key: BlockKey) -> None:
        """A hit, wherever the block is."""
        row = self.table.get(key)
        assert row is not None
        for policy, address in zip(self.policies, (row.page, row.slot, row.extent), strict=True):
            if address is not None:
                policy.touch(key)

    def forget(self, key: BlockKey) -> None:
        """Nobody may find it again, in any tier."""
        self.lower.cancel_save(key)
        row = self.table.get(key)
        if row is None:
            return
        self.hbm.leave(row)
        self.lower.drop_slot(row)
        self.lower.extents.drop(row)
        self.table.forget(row)
