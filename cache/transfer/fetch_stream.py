"""Fetches blocks from disk and Redis into DRAM for queued turns (AttentionStore §3.3.1), on one thread per tier."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from queue import SimpleQueue
from typing import ClassVar

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import is_coded
from reprise.cache.moves import FetchBlocks, Fetched, FetchRemote, NotTransferred, Transferred
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_store import ExtentStore
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.slab import CodedSlab, Segments, Slab
from reprise.cache.transfer.events import Events
from reprise.kernels.device_errors import MEMORY_ERRORS, lacks_memory

Found = Sequence[tuple[BlockKey, int, int]]
"""Blocks of one extent: (key, index in the extent, DRAM slot), with ascending indices."""


class FetchStream(ABC):
    """A stream that fetches blocks from one tier for a Transfer. `run` is the work of a thread; the engine's thread
    calls the other methods."""

    direction: ClassVar[str]

    def __init__(self, *, slab: Slab, completions: Events, coded: CodedSlab | None = None) -> None:
        """Set up. coded: the slab for blocks that a codec has compressed."""
        self._slab, self._coded, self._completions = slab, coded, completions
        self._orders: SimpleQueue[FetchBlocks | FetchRemote | None] = SimpleQueue()
        self._log = RareLog()

    def put(self, order: FetchBlocks | FetchRemote) -> None:
        """Queue a fetch into DRAM. Fetches are made in the order of these calls."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread finish the queued fetches and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Fetch queued blocks until `close`."""
        while (order := self._orders.get()) is not None:
            self._fetch(order)

    def _fetch(self, order: FetchBlocks | FetchRemote) -> None:
        started = time.perf_counter()
        failed: dict[BlockKey, str] = {}
        by_extent: dict[int | bytes, list[tuple[BlockKey, int, int]]] = {}
        for key, (extent, place), slot in order.blocks:
            self._slots_for(extent).unseal(slot)
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
            self._completions.tell(NotTransferred(self.direction, size, seconds))
        self._completions.tell(Fetched(order.job_id, failed))

    def _fetch_what_can_be(self, extent: int | bytes, found: Found) -> dict[BlockKey, str]:
        """Fetch the blocks of an extent that can be read. Returns the others, with the reasons. A damaged block does
        not prevent others of its extent from being fetched."""
        failed: dict[BlockKey, str] = {}
        while found:
            try:
                checksums = self._fill(extent, found)
            except BlockMissing as error:
                failed.update((key, error.reason) for key, place, _ in found if error.concerns(extent, place))
                found = [block for block in found if block[0] not in failed]
            except MEMORY_ERRORS as error:
                if not lacks_memory(error):
                    raise
                self._log.warn("memory", "%d blocks were not fetched, there was no memory: %s", len(found), error)
                failed.update((key, "memory") for key, _, _ in found)
                break
            else:
                for (_, _, slot), sums in zip(found, checksums, strict=True):
                    self._slots_for(extent).seal_as(slot, sums)
                break
        return failed

    def _slots_for(self, extent: int | bytes) -> Segments:
        return self._coded if self._coded is not None and is_coded(extent) else self._slab

    @abstractmethod
    def _fill(self, extent: int | bytes, found: Found) -> list[tuple[bytes, ...]]:
        """Read blocks into their slots and verify them. Returns their checksums, by layer. Raises BlockMissing."""

    def _read(self, extent: int | bytes, found: Found, read: Callable[[int, list[memoryview]], None]) -> None:
        """Read all layers into the slots. read(layer, one buffer for each block): fills the buffers with verified
        bytes."""
        slots = self._slots_for(extent)
        for layer in range(slots.num_layers):
            read(layer, [slots.segment(layer, slot) for _, _, slot in found])


class DiskFetches(FetchStream):
    """A FetchStream whose blocks come from disk."""

    direction = "disk_to_dram"

    def __init__(self, *, slab: Slab, disk: ExtentStore, completions: Events, coded: CodedSlab | None = None) -> None:
        super().__init__(slab=slab, coded=coded, completions=completions)
        self._disk = disk

    def _fill(self, extent: int | bytes, found: Found) -> list[tuple[bytes, ...]]:
        assert isinstance(extent, int)
        places = [place for _, place, _ in found]
        with self._disk.reader(extent) as reader:
            checksums = [reader.checksums(place, key) for key, place, _ in found]
            self._read(extent, found, lambda layer, outs: reader.read(layer, places, outs))
        return checksums
