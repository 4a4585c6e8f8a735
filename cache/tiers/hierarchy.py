"""Holds the tiers side by side, and does what has to be done in all of them at once."""

from collections.abc import Iterable

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.scores import Scores
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import Orders
from reprise.cache.options import CacheOptions
from reprise.cache.policies.eviction_policy import PolicyFactory
from reprise.cache.returns.regulars import Regulars
from reprise.cache.returns.return_times import ReturnTimes
from reprise.cache.returns.succession import Succession
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.coded import CodedTier
from reprise.cache.tiers.disk import DiskLedger
from reprise.cache.tiers.dram import DramTier
from reprise.cache.tiers.encoder import Encoder
from reprise.cache.tiers.fetches import Fetches
from reprise.cache.tiers.hbm import HbmPool
from reprise.cache.tiers.holds import DirtyBlocks, PinnedSessions
from reprise.cache.tiers.pages import PageAllocator
from reprise.cache.tiers.redis import RedisLedger
from reprise.cache.tiers.write_behind import WriteBehind


class Hierarchy:
    """Single-threaded, part of the CacheManager.

    hbm, dram, disk     which blocks lie where in a tier, and what leaves it
    coded               the part of DRAM where blocks lie as a codec made them; encoder: what comes there
    redis               the same for the tier that other servers share
    fetches, writes     what is on its way between DRAM and the tiers below
    orders              the moves that all of these and `cache/requests/` have decided on
    """

    def __init__(self, *, options: CacheOptions, policy: PolicyFactory, stats: CacheStats) -> None:
        self.stats = stats
        self.table, self.orders = CacheTable(), Orders()
        self.pages = PageAllocator(num_pages=options.num_pages, prefer_contiguous=options.prefer_contiguous)
        self.scores = Scores(table=self.table)
        self.pinned = PinnedSessions()
        self.returns = ReturnTimes()  # shared by the policies of all tiers
        self.regulars = Regulars()
        self.succession = Succession()
        dirty = DirtyBlocks(has_disk=options.disk_bytes > 0)
        self.hbm = HbmPool(
            table=self.table,
            pages=self.pages,
            page_size=options.page_size,
            bytes_per_token=options.bytes_per_token,
            policy=policy(self.returns),
            has_slots=options.num_slots > 0,
            scores=self.scores,
            high_water=options.hbm_high_water,
            low_water=options.hbm_low_water,
            stats=stats,
        )
        self.coded = CodedTier(
            table=self.table,
            num_slots=options.coded_slots,
            slot_bytes=options.coded_block_bytes,
            policy=policy(self.returns),
            pinned=self.pinned,
            dirty=dirty,
            stats=stats,
        )
        self.dram = DramTier(
            table=self.table,
            pages=self.pages,
            num_slots=options.num_slots,
            dram_slots=options.dram_slots,
            slot_bytes=options.bytes_per_token * BLOCK_TOKENS,
            free_buffer=options.dram_free_buffer if options.disk_bytes else 0.0,
            coded=self.coded,
            policy=policy(self.returns),
            pinned=self.pinned,
            dirty=dirty,
            orders=self.orders,
            stats=stats,
        )
        self.encoder = Encoder(
            table=self.table, dram=self.dram, coded=self.coded, dirty=dirty, orders=self.orders, stats=stats
        )
        self.disk = DiskLedger(
            table=self.table,
            capacity_bytes=options.disk_bytes,
            policy=policy(self.returns),
            pinned=self.pinned,
            dirty=dirty,
            orders=self.orders,
            stats=stats,
        )
        self.redis = RedisLedger(
            is_on=bool(options.head_key),
            capacity_bytes=options.redis_bytes,
            table=self.table,
            disk=self.disk,
            returns=self.returns,
            bytes_per_token=options.bytes_per_token,
            unix_offset_s=options.unix_offset_s,
            orders=self.orders,
            stats=stats,
        )
        self.fetches = Fetches(
            codes=bool(options.coded_block_bytes),
            table=self.table,
            dram=self.dram,
            coded=self.coded,
            disk=self.disk,
            redis=self.redis,
            orders=self.orders,
            stats=stats,
        )
        self.writes = WriteBehind(
            table=self.table,
            dram=self.dram,
            coded=self.coded,
            encoder=self.encoder,
            disk=self.disk,
            coded_block_bytes=options.coded_block_bytes,
            dirty=dirty,
            orders=self.orders,
            stats=stats,
        )
        self.policies = [self.hbm.policy, self.dram.policy, self.disk.policy]
        if self.coded.is_on:
            self.policies.append(self.coded.policy)

    def used(self, name: SessionName, now: float, num_tokens: int | None = None) -> None:
        """Record that a turn arrived with a prompt of so many tokens; None: it soon will, or did before a restart."""
        self.regulars.used(name, now)
        if num_tokens is not None:
            self.succession.came(name)
        self.returns.used(name, now, num_tokens)

    def answered(self, name: SessionName, now: float, num_tokens: int) -> None:
        """Record that a turn is over and its session's context has so many tokens."""
        self.returns.answered(name, now, num_tokens)

    def forget_session(self, name: SessionName) -> None:
        """Forget a session that owns no block any more."""
        self.regulars.forget(name)
        self.succession.forget(name)
        for policy in self.policies:
            policy.forget(name)
        self.returns.forget(name)

    def own(self, row: BlockRow, name: SessionName, place: int) -> None:
        """Record that a block stands in a session's context, after `place` others."""
        if name not in row.owners:
            row.owners = (*row.owners, name)
        row.place = place
        for policy in self.policies:
            policy.own(row.key, name, place)

    def touch(self, key: BlockKey) -> None:
        """Record a hit in every tier that has the block."""
        row = self.table.get(key)
        assert row is not None
        for policy, address in zip(self.policies, (row.page, row.slot, row.extent, row.coded), strict=False):
            if address is not None:
                policy.touch(key)

    def forget(self, key: BlockKey) -> None:
        """Let nobody find a block again, in any tier."""
        self.dram.cancel_save(key)
        row = self.table.get(key)
        if row is None:
            return
        self.hbm.leave(row)
        self.dram.drop_slot(row)
        self.coded.drop_slot(row)
        self.disk.drop(row)
        self.redis.drop(row)
        self.table.forget(row)

    def quarantine(self, tier: str) -> None:
        """Stop using `dram` or `disk` in this process and believe nothing in it, because what came out of it was wrong
        although it was intact."""
        (self.dram if tier == "dram" else self.disk).quarantine()
        if tier == "dram":
            self.coded.quarantine()

    def is_busy(self, name: SessionName) -> bool:
        """Whether blocks of a session are being saved, encoded, fetched or written."""
        if self.redis.is_uploading(name) or self.encoder.concerns(name):
            return True
        return self.writes.is_writing(name) or name in self.dram.owners_saving() or self.fetches.concern(name)

    def delete_session(self, name: SessionName, rows: Iterable[BlockRow], waiter: str | None) -> None:
        """Remove these blocks from DRAM and disk, and the extents they are in; `DiskLedger.ended_deletions` names
        `waiter` when that is done. Other blocks of those extents lose their copy on disk, and are written again if DRAM
        has them."""
        extent_ids: dict[int, None] = {}
        for row in rows:
            self.dram.drop_slot(row)
            self.coded.drop_slot(row)
            if row.extent is not None:
                extent_ids[row.extent[0]] = None
        self.writes.forget(name)
        if waiter is not None:
            self.redis.delete(name[0], name[2], waiter)  # one that has only expired here may live on elsewhere
        self.disk.delete(list(extent_ids), name, waiter)

    @property
    def in_flight(self) -> int:
        """Saves, encodings, fetches, writes and deletions under way, and sessions to be recorded; zero at idle."""
        return (
            self.dram.in_flight
            + self.encoder.in_flight
            + self.fetches.in_flight
            + self.writes.in_flight
            + self.disk.in_flight
            + self.redis.in_flight
        )
