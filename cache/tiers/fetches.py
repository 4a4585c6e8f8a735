"""Orders fetches from disk and Redis into DRAM for turns that are expected (AttentionStore §3.3.1)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache.blocks.keys import BlockKey
from cache.blocks.stored import is_coded
from cache.blocks.table import BlockRow, CacheTable, SessionName
from cache.moves import NOT_ITS_COPY, FetchBlocks, FetchRemote, Orders
from cache.stats import CacheStats
from cache.tiers.disk import DiskLedger
from cache.tiers.dram import DramTier
from cache.tiers.redis import RedisLedger


@dataclass(frozen=True, slots=True)
class _Fetch:
    order: FetchBlocks | FetchRemote
    session: SessionName  # for which it was ordered


class Fetches:
    """Knows every fetch under way. Single-threaded, part of the CacheManager."""

    def __init__(
        self,
        *,
        table: CacheTable,
        dram: DramTier,
        disk: DiskLedger,
        redis: RedisLedger,
        codes: bool,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        """codes: what lies below DRAM is coded, where an extent says so."""
        self._table, self._dram, self._disk, self._redis, self._codes = table, dram, disk, redis, codes
        self._orders, self._stats = orders, stats
        self._under_way: dict[int, _Fetch] = {}  # by job
        self._coming: dict[BlockKey, str] = {}  # block -> the tier from which it is fetched

    @property
    def in_flight(self) -> int:
        """Number of fetches under way."""
        return len(self._under_way)

    def is_fetching(self, key: BlockKey) -> bool:
        return key in self._coming

    def tier_of(self, key: BlockKey) -> str | None:
        """Return the tier from which a block is being fetched: disk or redis; None if it is not."""
        return self._coming.get(key)

    def concern(self, name: SessionName) -> bool:
        """Whether a block of this session is being fetched."""
        return any((row := self._table.get(key)) is not None and name in row.owners for key in self._coming)

    def has_room(self) -> bool:
        """Whether DRAM would keep one more block beside those that are being fetched."""
        return self._kept < self._dram.most_resident and self._dram.num_free > 0

    @property
    def _kept(self) -> int:
        """Number of blocks in DRAM and of those being fetched into it."""
        return self._dram.resident + len(self._coming)

    def fetch(self, rows: Iterable[BlockRow], newcomer: SessionName) -> bool:
        """Fetch those of these blocks that are only on disk or in Redis, as far as DRAM may keep them: at the expense
        of blocks that should leave before one of that session, never into slots that `trim` would empty again. Returns
        whether that was all."""
        from_disk, from_redis = [], []
        wanted = [row for row in rows if (row.extent or row.redis) and row.slot is None and row.key not in self._coming]
        if (excess := self._kept + len(wanted) - self._dram.most_resident) > 0:
            self._dram.make_room(excess, newcomer)
        for row in wanted[: max(0, self._dram.most_resident - self._kept)]:
            slot = self._dram.take_slot(newcomer)
            if slot is None:
                break
            self._coming[row.key] = row.tier
            if row.extent is not None:
                from_disk.append((row.key, row.extent, slot))
            elif row.redis is not None:
                from_redis.append((row.key, row.redis, slot))
        if from_disk:
            self._disk.hold(key for key, _, _ in from_disk)
            self._order(FetchBlocks(self._orders.next_job(), tuple(from_disk)), newcomer)
        if from_redis:
            self._order(FetchRemote(self._orders.next_job(), tuple(from_redis)), newcomer)
        return len(from_disk) + len(from_redis) == len(wanted)

    def _order(self, order: FetchBlocks | FetchRemote, session: SessionName) -> None:
        self._under_way[order.job_id] = _Fetch(order, session)
        self._orders.add(order)

    def on_fetched(self, job: int, failed: Mapping[BlockKey, str], now: float) -> None:
        """Record the end of a fetch. Blocks that came are in DRAM, unless they have left the tier below meanwhile; a
        bad copy is not looked for there again."""
        fetch = self._under_way.pop(job)
        order = fetch.order
        is_remote = isinstance(order, FetchRemote)
        for reason in failed.values():
            self._stats.load_failures[reason] += 1
        for key, copy, slot in order.blocks:
            del self._coming[key]
            row = self._table.get(key)
            if key in failed or row is None or row.slot is not None or (row.redis if is_remote else row.extent) != copy:
                self._dram.give_back(slot)
            else:
                row.decoded |= self._codes and is_coded(copy[0])
                self._dram.attach(row, slot)
        if isinstance(order, FetchRemote):
            self._redis.settle({key: copy for key, copy, _ in order.blocks}, failed, fetch.session, now)
            return
        self._disk.release(key for key, _, _ in order.blocks)
        for key, copy, _ in order.blocks:
            row = self._table.get(key)
            if failed.get(key, "late") not in NOT_ITS_COPY and row is not None and row.extent == copy:
                self._disk.drop(row)
                if row.is_nowhere:
                    self._table.forget(row)
