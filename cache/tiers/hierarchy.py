"""Holds the tiers together, and does what has to be done in all of them at once."""

from collections.abc import Iterable, Mapping

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.scores import Scores
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName, TierName, medium_of
from reprise.cache.moves import Orders
from reprise.cache.options import CacheOptions
from reprise.cache.policies.eviction_policy import PolicyFactory
from reprise.cache.returns.announced import Announced
from reprise.cache.returns.regulars import Regulars
from reprise.cache.returns.return_times import ReturnTimes
from reprise.cache.returns.succession import Succession
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.disk import DiskLedger
from reprise.cache.tiers.dram import Dram
from reprise.cache.tiers.fetches import Fetches
from reprise.cache.tiers.hbm import HbmPool
from reprise.cache.tiers.holds import DirtyBlocks, Holds, PinnedSessions
from reprise.cache.tiers.pages import PageAllocator
from reprise.cache.tiers.redis import RedisLedger
from reprise.cache.tiers.tier import Tier
from reprise.cache.tiers.write_behind import WriteBehind


class Hierarchy:
    """The ledgers of all tiers, for the CacheManager's parts, which call it on the engine's thread.

    hbm                 which blocks lie in pages
    dram, disk, redis   which blocks lie where in a tier below, and what leaves it; `below` has them by name
    fetches, writes     what is being moved between DRAM and the tiers below
    dirty               which blocks in DRAM are still to be written to disk
    form                which blocks and copies a codec has compressed, or may
    orders              the moves that all of these and `cache/requests/` have decided on
    """

    def __init__(self, *, options: CacheOptions, policy: PolicyFactory, stats: CacheStats) -> None:
        self.stats = stats
        self.table, self.orders = table, orders = CacheTable(), Orders()
        self.pages = PageAllocator(num_pages=options.num_pages, prefer_contiguous=options.prefer_contiguous)
        self.scores = Scores(table=table)
        self.pinned = PinnedSessions()
        self.returns = ReturnTimes()  # shared by the policies of all tiers
        self.regulars = Regulars()
        self.succession = Succession()
        self.announced = Announced()
        self.form = form = CodedForm(block_bytes=options.coded_block_bytes, has_slots=options.coded_slots > 0)
        self.dirty = dirty = DirtyBlocks(has_disk=options.disk_bytes > 0)
        holds = Holds(pinned=self.pinned, dirty=dirty, form=form)
        self.hbm = HbmPool(
            options=options,
            table=table,
            pages=self.pages,
            policy=policy(self.returns),
            scores=self.scores,
            stats=stats,
        )
        self.dram = Dram(
            options=options,
            form=form,
            table=table,
            pages=self.pages,
            new_policy=lambda: policy(self.returns),
            holds=holds,
            orders=orders,
            stats=stats,
        )
        self.disk = DiskLedger(
            table=table,
            capacity_bytes=options.disk_bytes,
            policy=policy(self.returns),
            holds=holds,
            orders=orders,
            stats=stats,
        )
        self.redis = RedisLedger(
            options=options, table=table, disk=self.disk, returns=self.returns, orders=orders, stats=stats
        )
        self.below: Mapping[TierName, Tier] = {
            tier.name: tier for tier in (self.dram.rows, self.dram.coded, self.disk, self.redis)
        }
        self.fetches = Fetches(
            table=table, dram=self.dram, disk=self.disk, redis=self.redis, form=form, orders=orders, stats=stats
        )
        self.writes = WriteBehind(
            table=table, dram=self.dram, disk=self.disk, form=form, dirty=dirty, orders=orders, stats=stats
        )
        self.policies = [self.hbm.policy, self.dram.rows.policy, self.disk.policy]
        if self.dram.coded.is_on:
            self.policies.append(self.dram.coded.policy)

    def used(self, name: SessionName, now: float, num_tokens: int | None = None) -> None:
        """Record that a turn of a session has arrived with a prompt of `num_tokens` tokens; None: it arrived before a
        restart of the server, and its prompt is not known."""
        self.announced.remove(name)
        self.regulars.used(name, now)
        if num_tokens is not None:
            self.succession.came(name)
        self.returns.used(name, now, num_tokens)

    def answered(self, name: SessionName, now: float, num_tokens: int) -> None:
        """Record that a turn has ended and its session's context has `num_tokens` tokens."""
        self.returns.answered(name, now, num_tokens)

    def forget_session(self, name: SessionName) -> None:
        """Forget a session that owns no block any more."""
        self.announced.remove(name)
        self.regulars.forget(name)
        self.succession.forget(name)
        for policy in self.policies:
            policy.forget(name)
        self.returns.forget(name)

    def own(self, row: BlockRow, name: SessionName, place: int) -> None:
        """Record that a session owns a block. place: index of the block in the session's context."""
        if name not in row.owners:
            row.owners = (*row.owners, name)
        row.place = place
        for policy in self.policies:
            policy.own(row.key, name, place)

    def touch(self, key: BlockKey) -> None:
        """Record a hit in every tier that has the block."""
        row = self.table.get(key)
        assert row is not None
        if row.page is not None:
            self.hbm.policy.touch(key)
        for tier in row.tiers:
            self.below[tier].touch(row)

    def bytes_in(self, row: BlockRow, medium: str) -> int:
        """Return the bytes that a block takes in one tier. medium: dram, disk or redis."""
        tiers = (tier for name, tier in self.below.items() if name in row.copies and medium_of(name) == medium)
        if medium != "dram" and self.form.is_coded_below(row):
            return self.form.block_bytes
        return sum(tier.bytes_of(row) for tier in tiers)

    def drop_copy(self, row: BlockRow, tier: TierName) -> None:
        """Forget a block's copy in one tier, and the block if that was its last copy."""
        self.below[tier].drop(row)
        if row.is_nowhere:
            self.table.forget(row)

    def forget(self, key: BlockKey) -> None:
        """Remove a block from the table and from every tier, so that no request finds it any more."""
        self.dram.saves.cancel(key)
        row = self.table.get(key)
        if row is None:
            return
        self.hbm.leave(row)
        for tier in row.tiers:
            self.below[tier].drop(row)
        self.table.forget(row)

    def quarantine(self, tier: str) -> None:
        """Stop using `dram` or `disk` in this process, and everything in it, because it gave wrong results although the
        checksums were right."""
        (self.dram if tier == "dram" else self.disk).quarantine()

    def disk_given_up(self, problem: str) -> None:
        """Stop using the disk, and what lies on it, until `disk_taken` is called. Meanwhile blocks are allowed to leave
        DRAM without having been written to disk. problem: the reason, as a text for people."""
        self.disk.problem = problem
        self.writes.disk_given_up()
        self.table.moved()

    def disk_taken(self, capacity_bytes: int) -> None:
        """Start to use the disk, because it answers. capacity_bytes: the most that it may hold."""
        self.disk.problem, self.disk.capacity_bytes = None, capacity_bytes
        self.writes.disk_taken()
        self.table.moved()

    def condemn_codec(self) -> None:
        """Stop using the codec in this process, because it changes answers by more than it may."""
        self.form.is_condemned = True
        self.dram.coded.quarantine()

    def is_busy(self, name: SessionName) -> bool:
        """Return whether a copy of any block of a session is being made: saved or compressed in DRAM, fetched, written
        to disk or uploaded to Redis."""
        if self.redis.is_uploading(name) or self.dram.is_busy(name):
            return True
        return self.writes.is_writing(name) or self.fetches.concern(name)

    def delete_session(self, name: SessionName, rows: Iterable[BlockRow], waiter: str | None) -> None:
        """Remove these blocks from DRAM and disk, with the extents they are in. waiter: the client's request that waits
        for it, which `DiskLedger.ended_deletions` will list when the disk has done it; None: no request waits. Other
        blocks of those extents lose their copy on disk, and are written again if DRAM has them."""
        extent_ids: dict[int, None] = {}
        for row in rows:
            self.dram.drop(row)
            if "disk" in row.copies:
                extent_ids[row.copies["disk"][0]] = None
        self.writes.forget(name)
        if waiter is not None:
            self.redis.delete(name[0], name[2], waiter)  # one that has only expired here may live on elsewhere
        self.disk.delete(list(extent_ids), name, waiter)

    @property
    def in_flight(self) -> int:
        """The number of saves, encodings, fetches, writes, uploads and deletions under way and of sessions to be
        recorded; 0 when idle."""
        return (
            self.dram.in_flight
            + self.fetches.in_flight
            + self.writes.in_flight
            + self.disk.in_flight
            + self.redis.in_flight
        )
