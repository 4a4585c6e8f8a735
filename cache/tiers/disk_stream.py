"""The disk stream: DRAM -> disk and back, on a thread of its own."""

import logging
import time
from queue import SimpleQueue

from cache.block import BlockKey
from cache.plan import (
    BlockLoad,
    Deleted,
    DeleteExtents,
    FetchBlocks,
    Fetched,
    PutSession,
    Transferred,
    WriteExtent,
    Written,
)
from cache.tiers.base import BlockMissing, TierFailed, TierFull
from cache.tiers.completions import Completions
from cache.tiers.disk import DiskTier
from cache.tiers.dram import Slab
from cache.tiers.layer_source import LayerSource

log = logging.getLogger(__name__)

DiskOrder = WriteExtent | FetchBlocks | DeleteExtents | PutSession


class DiskStream:
    """`run` is the thread; the other methods are called by the engine's."""

    def __init__(self, *, slab: Slab, disk: DiskTier, completions: Completions) -> None:
        self._slab, self._disk, self._completions = slab, disk, completions
        self._orders: SimpleQueue[DiskOrder | None] = SimpleQueue()

    def put(self, order: DiskOrder) -> None:
        """To be done when those before it are."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread do what it was given, and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Works until `close`."""
        while (order := self._orders.get()) is not None:
            match order:
                case WriteExtent():
                    self._write(order)
                case FetchBlocks():
                    self._fetch(order)
                case DeleteExtents():
                    self._delete(order)
                case PutSession():
                    try:
                        self._disk.put_session(order.record)
                    except TierFailed as error:
                        log.warning("a session was not recorded: %s", error)

    def _write(self, order: WriteExtent) -> None:
        started = time.perf_counter()
        try:
            extent = self._disk.write(
                order.session, order.blocks, lambda layer, block: self._slab.segment(layer, order.slots[block])
            )
        except (TierFull, TierFailed) as error:
            log.warning("%d blocks were not written to disk: %s", len(order.blocks), error)
            self._completions.tell(Written(order.job_id, None, str(error)))
            return
        seconds = time.perf_counter() - started
        self._completions.tell(
            Transferred("dram_to_disk", extent.size_bytes, seconds), Written(order.job_id, extent, None)
        )

    def _delete(self, order: DeleteExtents) -> None:
        problem = None
        try:
            for extent_id in order.extent_ids:
                self._disk.delete(extent_id)
            if order.session is not None:
                self._disk.delete_session(*order.session)
        except TierFailed as error:
            log.warning("%d extents were not deleted: %s", len(order.extent_ids), error)
            problem = str(error)
        self._completions.tell(Deleted(order.job_id, problem))

    def _fetch(self, order: FetchBlocks) -> None:
        started = time.perf_counter()
        failed: dict[BlockKey, str] = {}
        loads = [BlockLoad(key, 1, slot, extent, 0, 0, 0) for key, extent, slot in order.blocks]
        source = LayerSource(loads, self._slab, self._disk)
        try:
            with source:
                for layer in range(self._slab.num_layers):
                    source.read_disk(layer)
                source.seal_passed()
        except BlockMissing as error:
            failed = {key: error.reason for key, _, _ in order.blocks}
        size = len(order.blocks) * self._slab.slot_bytes
        if not failed:
            self._completions.tell(Transferred("disk_to_dram", size, time.perf_counter() - started))
        self._completions.tell(Fetched(order.job_id, failed))
