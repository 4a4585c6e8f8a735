"""Writes extents from DRAM to disk and deletes them there, on a thread of its own, since no request waits for
writes."""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import StoredBlock
from reprise.cache.moves import Deleted, DeleteExtents, Lost, PutSession, Transferred, WriteExtent, Written
from reprise.cache.storage.errors import TierFailed, TierFull
from reprise.cache.storage.extent_file import runs
from reprise.cache.storage.extent_store import ExtentStore
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.slab import CodedSlab, Segments, Slab
from reprise.cache.transfer.coding import encode_slots
from reprise.cache.transfer.events import Events
from reprise.kernels.device_errors import MEMORY_ERRORS, lacks_memory

_DELETIONS_TOGETHER = 64  # deletions made together; the orders after them wait for as long
WriteOrder = WriteExtent | DeleteExtents | PutSession


class WriteStream:
    """A stream that writes and deletes extents for a Transfer. `run` is the work of a thread; the engine's thread calls
    the other methods."""

    def __init__(self, *, slab: Slab, disk: ExtentStore, completions: Events, coded: CodedSlab | None = None) -> None:
        self._slab, self._disk, self._coded, self._completions = slab, disk, coded, completions
        self._log = RareLog()
        self._orders: SimpleQueue[WriteOrder | None] = SimpleQueue()
        self._looked_at: deque[WriteOrder | None] = deque()  # taken from `_orders`, to be done before the rest

    def put(self, order: WriteOrder) -> None:
        """Queue a write or a deletion on disk. Orders are carried out in the order of these calls."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread finish the queued work and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Write and delete queued extents until `close`."""
        while (order := self._next()) is not None:
            match order:
                case WriteExtent():
                    self._write_if_there_is_memory(order)
                case DeleteExtents():
                    self._delete(self._with_later_ones(order))
                case PutSession():
                    try:
                        self._disk.put_session(order.record)
                    except TierFailed as error:
                        self._log.warn(f"session {error.reason}", "a session was not recorded: %s", error)
            if lost := self._disk.take_lost():
                self._completions.tell(Lost(tuple(lost)))

    def _write_if_there_is_memory(self, order: WriteExtent) -> None:
        try:
            self._write(order)
        except MEMORY_ERRORS as error:
            if not lacks_memory(error):
                raise
            self._log.warn("write memory", "%d blocks were not written, no memory: %s", len(order.blocks), error)
            self._completions.tell(Written(order.job_id, None, "there was no memory"))

    def _write(self, order: WriteExtent) -> None:
        started = time.perf_counter()
        blocks: Sequence[StoredBlock] = order.blocks
        refused: tuple[BlockKey, ...] = ()
        if order.is_coded and not order.from_coded:
            assert self._coded is not None
            encoded = encode_slots(self._coded.codec, self._slab, order.slots)
            refused = tuple(block.key for block, is_coded in zip(blocks, encoded.taken, strict=True) if not is_coded)
            blocks = [block for block, is_coded in zip(blocks, encoded.taken, strict=True) if is_coded]
            if not blocks:
                self._completions.tell(Written(order.job_id, None, "the codec took none of the blocks", refused))
                return
            checksums, segments = encoded.checksums, encoded.segments
        else:
            slots = self._coded if order.from_coded and self._coded is not None else self._slab
            # Slots are handed out in a row as a rule: a dozen pieces instead of one for each block and layer.
            spans = [(order.slots[first], order.slots[stop - 1] + 1) for first, stop in runs(order.slots)]
            checksums = slots.checksums(order.slots)
            segments = partial(self._spans, slots, spans)
        try:
            extent = self._disk.write(
                order.session, blocks, checksums, segments, extent_id=order.extent_id, is_coded=order.is_coded
            )
        except (TierFull, TierFailed) as error:
            kind = error.reason if isinstance(error, TierFailed) else "full"
            self._log.warn(f"write {kind}", "%d blocks were not written to disk: %s", len(blocks), error)
            self._completions.tell(Written(order.job_id, None, str(error)))
            return
        seconds = time.perf_counter() - started
        self._completions.tell(
            Transferred("dram_to_disk", extent.size_bytes, seconds), Written(order.job_id, extent, None, refused)
        )

    @staticmethod
    def _spans(slots: Segments, spans: Sequence[tuple[int, int]], layer: int) -> list[memoryview]:
        return [slots.span(layer, *span) for span in spans]

    def _next(self) -> WriteOrder | None:
        return self._looked_at.popleft() if self._looked_at else self._orders.get()

    def _with_later_ones(self, order: DeleteExtents) -> list[DeleteExtents]:
        """Return a deletion and those that follow it directly in the queue, to be made together: a deletion waits for
        the device some five times, however much it deletes. A hundred sessions deleted one by one held up a turn's KV
        for seconds."""
        orders = [order]
        while len(orders) < _DELETIONS_TOGETHER:
            try:
                following = self._orders.get_nowait()
            except Empty:
                break
            if not isinstance(following, DeleteExtents):
                self._looked_at.append(following)
                break
            orders.append(following)
        return orders

    def _delete(self, orders: list[DeleteExtents]) -> None:
        extent_ids = [extent_id for order in orders for extent_id in order.extent_ids]
        problem = None
        try:
            self._disk.delete(*extent_ids)
            if sessions := [order.session for order in orders if order.session is not None]:
                self._disk.delete_sessions(*sessions)
        except TierFailed as error:
            if len(orders) > 1:  # one by one: one failure does not fail the others
                for order in orders:
                    self._delete([order])
                return
            self._log.warn(f"delete {error.reason}", "%d extents were not deleted: %s", len(extent_ids), error)
            problem = str(error)
        self._completions.tell(*(Deleted(order.job_id, problem) for order in orders))
