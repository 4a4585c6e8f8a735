"""Orders fetches from disk and Redis into DRAM for turns that are expected (AttentionStore §3.3.1)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import NOT_ITS_COPY, FetchBlocks, FetchRemote, Orders
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.disk import DiskLedger
from reprise.cache.tiers.dram import Dram
from reprise.cache.tiers.redis import RedisLedger


@dataclass(frozen=True, slots=True)
class _Fetch:
    order: FetchBlocks | FetchRemote
    session: SessionName  # session for which it was ordered


class Fetches:
    """The fetches under way. LookAhead, Parking and the SessionStore order fetches and the CacheManager reports their
    end, all on the engine's thread."""

    def __init__(
        self,
        *,
        table: CacheTable,
        dram: Dram,
        disk: DiskLedger,
        redis: RedisLedger,
        form: CodedForm,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        self._table, self._dram, self._form = table, dram, form
        self._disk, self._redis = disk, redis
        self._orders, self._stats = orders, stats
        self._under_way: dict[int, _Fetch] = {}  # fetches under way, by job
        self._coming: dict[BlockKey, str] = {}  # block -> the tier from which it is fetched
        self._coming_coded: set[BlockKey] = set()  # blocks being fetched that a codec has compressed

    @property
    def in_flight(self) -> int:
        """The number of fetches under way."""
        return len(self._under_way)

    def is_fetching(self, key: BlockKey) -> bool:
        return key in self._coming

    def tier_of(self, key: BlockKey) -> str | None:
        """Return the tier from which a block is being fetched: disk or redis; None if it is not."""
        return self._coming.get(key)

    def concern(self, name: SessionName) -> bool:
        """Return whether a block of this session is being fetched."""
        return any((row := self._table.get(key)) is not None and name in row.owners for key in self._coming)

    def has_room(self, *, coded: bool) -> bool:
        """Return whether DRAM has room for one more block besides those that are being fetched. coded: whether the
        block is compressed by the codec."""
        return self._room(coded) > 0 and self._dram.slots_for(is_coded=coded).num_free > 0

    def _room(self, coded: bool) -> int:
        """Return for how many more blocks DRAM has room, besides those that are being fetched. coded: whether they are
        compressed."""
        tier = self._dram.slots_for(is_coded=coded)
        coming = len(self._coming_coded) if coded else len(self._coming) - len(self._coming_coded)
        return tier.most_resident - tier.resident - coming

    def fetch(self, rows: Iterable[BlockRow], newcomer: SessionName) -> bool:
        """Order that those blocks of `rows` which are on disk or in Redis but not in DRAM be fetched into DRAM, as far
        as there is room. newcomer: the session for which they are fetched; to make room, only blocks are evicted that
        should leave before one of its blocks. No more slots are filled than blocks may stay in DRAM; `Dram.trim` would
        evict the excess at once. Returns whether all were ordered. While the disk is not used, its blocks are left
        out."""
        from_disk, from_redis = [], []
        wanted = [row for row in rows if row.is_below_dram and not row.in_dram and row.key not in self._coming]
        if self._disk.problem is not None:
            wanted = [row for row in wanted if "disk" not in row.copies]
        num_coded = sum(map(self._form.is_coded_below, wanted))
        if (excess := len(wanted) - num_coded - self._room(coded=False)) > 0:
            self._dram.rows.make_room(excess, newcomer)
        if (excess := num_coded - self._room(coded=True)) > 0:
            self._dram.coded.make_room(excess, newcomer)
        left = {coded: self._room(coded) for coded in (False, True)}
        for row in wanted:
            comes_coded = self._form.is_coded_below(row)
            tier = self._dram.slots_for(is_coded=comes_coded)
            slot = tier.take_slot(newcomer) if left[comes_coded] > 0 else None
            if slot is None:
                left[comes_coded] = 0
                continue
            left[comes_coded] -= 1
            self._coming[row.key] = row.medium
            if comes_coded:
                self._coming_coded.add(row.key)
            if "disk" in row.copies:
                from_disk.append((row.key, row.copies["disk"], slot))
            else:
                from_redis.append((row.key, row.copies["redis"], slot))
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
        """Record the end of a fetch. Fetched blocks are in DRAM now. A block whose copy on disk or in Redis was deleted
        or replaced meanwhile is not entered. A bad copy is forgotten."""
        fetch = self._under_way.pop(job)
        order = fetch.order
        is_remote = isinstance(order, FetchRemote)
        for reason in failed.values():
            self._stats.load_failures[reason] += 1
        for key, copy, slot in order.blocks:
            del self._coming[key]
            row, comes_coded = self._table.get(key), key in self._coming_coded
            self._coming_coded.discard(key)
            tier = self._dram.slots_for(is_coded=comes_coded)
            if (
                key in failed
                or row is None
                or row.copies.get("redis" if is_remote else "disk") != copy
                or tier.name in row.copies
            ):
                tier.give_back(slot)
            else:
                tier.attach(row, slot)
        if isinstance(order, FetchRemote):
            self._redis.settle({key: copy for key, copy, _ in order.blocks}, failed, fetch.session, now)
            return
        self._disk.release(key for key, _, _ in order.blocks)
        for key, copy, _ in order.blocks:
            row = self._table.get(key)
            if failed.get(key, "late") not in NOT_ITS_COPY and row is not None and row.copies.get("disk") == copy:
                self._disk.drop(row)
                if row.is_nowhere:
                    self._table.forget(row)
