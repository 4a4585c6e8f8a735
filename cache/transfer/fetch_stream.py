"""Fetches from disk into DRAM for turns that are queued (AttentionStore §3.3.1), on a thread of its own."""

import time
from collections.abc import Sequence
from queue import SimpleQueue

from cache.blocks.keys import BlockKey
from cache.moves import FetchBlocks, Fetched, Transferred
from cache.storage.errors import BlockMissing
from cache.storage.extent_store import ExtentStore
from cache.storage.slab import Slab
from cache.transfer.events import Events


class FetchStream:
    """`run` is the work of a thread; the engine's thread calls the other methods."""

    def __init__(self, *, slab: Slab, disk: ExtentStore, completions: Events) -> None:
        self._slab, self._disk, self._completions = slab, disk, completions
        self._orders: SimpleQueue[FetchBlocks | None] = SimpleQueue()

    def put(self, order: FetchBlocks) -> None:
        """Order a fetch, after those ordered before."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread do what it was given, and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Fetch until `close`."""
        while (order := self._orders.get()) is not None:
            self._fetch(order)

    def _fetch(self, order: FetchBlocks) -> None:
        started = time.perf_counter()
        failed: dict[BlockKey, str] = {}
        by_extent: dict[int, list[tuple[BlockKey, int, int]]] = {}  # blocks, their places in an extent, their slots
        for key, (extent_id, place), slot in order.blocks:
            self._slab.unseal(slot)
            by_extent.setdefault(extent_id, []).append((key, place, slot))
        try:
            for extent_id, found in by_extent.items():
                self._fetch_from(extent_id, found)
        except BlockMissing as error:
            failed = {key: error.reason for key, _, _ in order.blocks}
        size = len(order.blocks) * self._slab.slot_bytes
        if not failed:
            self._completions.tell(Transferred("disk_to_dram", size, time.perf_counter() - started))
        self._completions.tell(Fetched(order.job_id, failed))

    def _fetch_from(self, extent_id: int, found: Sequence[tuple[BlockKey, int, int]]) -> None:
        """Fill slots from an extent. found: (block, its place in the extent, its slot). Raises BlockMissing."""
        places = [place for _, place, _ in found]
        with self._disk.reader(extent_id) as reader:
            checksums = [reader.checksums(place, key) for key, place, _ in found]
            for layer in range(self._slab.num_layers):
                reader.read(layer, places, [self._slab.segment(layer, slot) for _, _, slot in found])
            for (_, _, slot), sums in zip(found, checksums, strict=True):
                self._slab.seal_as(slot, sums)
