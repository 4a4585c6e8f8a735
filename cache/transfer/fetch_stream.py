"""Fetches from disk and Redis into DRAM for turns that are queued (AttentionStore §3.3.1), on a thread for each."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import itemgetter
from queue import SimpleQueue
from typing import ClassVar

from cache.blocks.keys import BlockKey
from cache.moves import FetchBlocks, Fetched, FetchRemote, Late, Transferred
from cache.storage.errors import BlockMissing
from cache.storage.extent_store import ExtentStore
from cache.storage.redis.extents import RedisExtents
from cache.storage.redis.reader import RedisReader
from cache.storage.slab import Slab
from cache.transfer.events import Events

Found = Sequence[tuple[BlockKey, int, int]]
"""Blocks of one extent, each with its place in it and its slot; places ascend."""


class FetchStream(ABC):
    """`run` is the work of a thread; the engine's thread calls the other methods."""

    direction: ClassVar[str]

    def __init__(self, *, slab: Slab, completions: Events) -> None:
        self._slab, self._completions = slab, completions
        self._orders: SimpleQueue[FetchBlocks | FetchRemote | None] = SimpleQueue()

    def put(self, order: FetchBlocks | FetchRemote) -> None:
        """Order a fetch, after those ordered before."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread do what it was given, and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Fetch until `close`."""
        while (order := self._orders.get()) is not None:
            self._fetch(order)

    def _fetch(self, order: FetchBlocks | FetchRemote) -> None:
        started = time.perf_counter()
        failed: dict[BlockKey, str] = {}
        by_extent: dict[int | bytes, list[tuple[BlockKey, int, int]]] = {}
        for key, (extent, place), slot in order.blocks:
            self._slab.unseal(slot)
            by_extent.setdefault(extent, []).append((key, place, slot))
        for extent, found in by_extent.items():
            if "deadline" in failed.values():  # the others would take as long
                failed.update((key, "deadline") for key, _, _ in found)
            else:
                failed.update(self._fetch_what_can_be(extent, sorted(found, key=itemgetter(1))))
        size, seconds = len(order.blocks) * self._slab.slot_bytes, time.perf_counter() - started
        if not failed:
            self._completions.tell(Transferred(self.direction, size, seconds))
        elif "deadline" in failed.values():
            self._completions.tell(Late(self.direction, size, seconds))
        self._completions.tell(Fetched(order.job_id, failed))

    def _fetch_what_can_be(self, extent: int | bytes, found: Found) -> dict[BlockKey, str]:
        """Returns the blocks that did not come, and why. One that is damaged keeps back no other of its extent."""
        failed: dict[BlockKey, str] = {}
        while found:
            try:
                checksums = self._fill(extent, found)
            except BlockMissing as error:
                failed.update((key, error.reason) for key, place, _ in found if error.concerns(extent, place))
                found = [block for block in found if block[0] not in failed]
            else:
                for (_, _, slot), sums in zip(found, checksums, strict=True):
                    self._slab.seal_as(slot, sums)
                break
        return failed

    @abstractmethod
    def _fill(self, extent: int | bytes, found: Found) -> list[tuple[bytes, ...]]:
        """Fill the slots with verified bytes. Returns the blocks' checksums, by layer. Raises BlockMissing."""

    def _segments(self, layer: int, found: Found) -> list[memoryview]:
        return [self._slab.segment(layer, slot) for _, _, slot in found]


class DiskFetches(FetchStream):
    """Fetches from disk."""

    direction = "disk_to_dram"

    def __init__(self, *, slab: Slab, disk: ExtentStore, completions: Events) -> None:
        super().__init__(slab=slab, completions=completions)
        self._disk = disk

    def _fill(self, extent: int | bytes, found: Found) -> list[tuple[bytes, ...]]:
        assert isinstance(extent, int)
        places = [place for _, place, _ in found]
        with self._disk.reader(extent) as reader:
            checksums = [reader.checksums(place, key) for key, place, _ in found]
            for layer in range(self._slab.num_layers):
                reader.read(layer, places, self._segments(layer, found))
        return checksums


class RedisFetches(FetchStream):
    """Fetches from Redis."""

    direction = "redis_to_dram"

    def __init__(self, *, slab: Slab, redis: RedisExtents, completions: Events) -> None:
        super().__init__(slab=slab, completions=completions)
        self._redis = redis

    def _fill(self, extent: int | bytes, found: Found) -> list[tuple[bytes, ...]]:
        assert isinstance(extent, bytes)
        reader = RedisReader(self._redis, [(extent, [place for _, place, _ in found])])
        checksums = [reader.checksums(0, place, key) for key, place, _ in found]
        for layer in range(self._slab.num_layers):
            reader.read(layer, self._segments(layer, found))
        return checksums
