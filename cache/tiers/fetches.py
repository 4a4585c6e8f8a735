"""Orders fetches from disk into DRAM for turns that are expected (AttentionStore §3.3.1)."""

from collections.abc import Iterable, Mapping

from cache.blocks.keys import BlockKey
from cache.blocks.table import BlockRow, CacheTable, SessionName
from cache.moves import NOT_ITS_COPY, FetchBlocks, Orders
from cache.stats import CacheStats
from cache.tiers.disk import DiskLedger
from cache.tiers.dram import DramTier


class Fetches:
    """Knows every fetch under way. Single-threaded, part of the CacheManager."""

    def __init__(
        self, *, table: CacheTable, dram: DramTier, disk: DiskLedger, orders: Orders, stats: CacheStats
    ) -> None:
        self._table, self._dram, self._disk = table, dram, disk
        self._orders, self._stats = orders, stats
        # job -> blocks, as in FetchBlocks
        self._under_way: dict[int, tuple[tuple[BlockKey, tuple[int, int], int], ...]] = {}
        self._coming: set[BlockKey] = set()

    @property
    def in_flight(self) -> int:
        """Number of fetches under way."""
        return len(self._under_way)

    def is_fetching(self, key: BlockKey) -> bool:
        return key in self._coming

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
        """Fetch those of these blocks that are only on disk, as far as DRAM may keep them: at the expense of blocks
        that should leave before one of that session, never into slots that `trim` would empty again. Returns whether
        that was all."""
        blocks = []
        wanted = [row for row in rows if row.extent and row.slot is None and row.key not in self._coming]
        if (excess := self._kept + len(wanted) - self._dram.most_resident) > 0:
            self._dram.make_room(excess, newcomer)
        for row in wanted[: max(0, self._dram.most_resident - self._kept)]:
            slot = self._dram.take_slot(newcomer)
            if slot is None:
                break
            assert row.extent is not None
            self._coming.add(row.key)
            blocks.append((row.key, row.extent, slot))
        if blocks:
            job = self._orders.next_job()
            self._under_way[job] = tuple(blocks)
            self._disk.hold(key for key, _, _ in blocks)
            self._orders.add(FetchBlocks(job, tuple(blocks)))
        return len(blocks) == len(wanted)

    def on_fetched(self, job: int, failed: Mapping[BlockKey, str]) -> None:
        """Record the end of a fetch. Blocks that came are in DRAM, unless they have left the disk meanwhile; a bad copy
        is not looked for there again."""
        blocks = self._under_way.pop(job)
        self._disk.release(key for key, _, _ in blocks)
        for key, extent, slot in blocks:
            self._coming.discard(key)
            row = self._table.get(key)
            if key in failed:
                self._stats.load_failures[failed[key]] += 1
                if failed[key] not in NOT_ITS_COPY and row is not None and row.extent == extent:
                    self._disk.drop(row)
                    if row.is_nowhere:
                        self._table.forget(row)
            elif row is not None and row.slot is None and row.extent == extent:
                self._dram.attach(row, slot)
                continue
            self._dram.give_back(slot)
