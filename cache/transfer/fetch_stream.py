"""Fetches from disk into DRAM for turns that are queued (AttentionStore §3.3.1), on a thread of its own."""

import time
from collections.abc import Sequence
from queue import SimpleQueue

from cache.blocks.keys import BlockKey
from cache.moves import FetchBlocks, Fetched, Late, Transferred
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
        for extent_id, found in by_extent.items():
            if "deadline" in failed.values():  # the others would take as long
                failed.update((key, "deadline") for key, _, _ in found)
            else:
                failed.update(self._fetch_what_can_be(extent_id, found))
        size, seconds = len(order.blocks) * self._slab.slot_bytes, time.perf_counter() - started
        if not failed:
            self._completions.tell(Transferred("disk_to_dram", size, seconds))
        elif "deadline" in failed.values():
            self._completions.tell(Late("disk_to_dram", size, seconds))
        self._completions.tell(Fetched(order.job_id, failed))

    def _fetch_what_can_be(self, extent_id: int, found: Sequence[tuple[BlockKey, int, int]]) -> dict[BlockKey, str]:
        """Returns the blocks that did not come, and why. One that is damaged keeps back no other of its extent."""
        failed: dict[BlockKey, str] = {}
        while found:
            try:
                self._fetch_from(extent_id, found)
                break
            except BlockMissing as error:
                failed.update((key, error.reason) for key, place, _ in found if error.concerns(extent_id, place))
                found = [block for block in found if block[0] not in failed]
        return failed

    def _fetch_from(self, extent_id: int, found: Sequence[tuple[BlockKey, int, int]]) -> None:
        """Fill slots from an extent. found: (block, its place in the extent, its slot). Raises BlockMissing."""
        places = [place for _, place, _ in found]
        with self._disk.reader(extent_id) as reader:
            checksums = [reader.checksums(place, key) for key, place, _ in found]
            for layer in range(self._slab.num_layers):
                reader.read(layer, places, [self._slab.segment(layer, slot) for _, _, slot in found])
            for (_, _, slot), sums in zip(found, checksums, strict=True):
                self._slab.seal_as(slot, sums)
