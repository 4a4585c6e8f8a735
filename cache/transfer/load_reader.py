"""Reads the layers of loads out of one tier, disk or Redis, in a thread of its own."""

import time
from collections.abc import Callable
from functools import partial

from reprise.cache.moves import NotTransferred
from reprise.cache.rates import LoadProgress
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.slab import Slab
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.layer_source import LandedSource, Landings, SlotSource
from reprise.cache.transfer.load_queue import LoadPart, LoadQueue
from reprise.kernels.device_errors import MEMORY_ERRORS, lacks_memory

MakeSource = Callable[[LoadPart, Landings], LandedSource]


class LoadReader:
    """A reader of layers from one tier for a LoadStream. `run` is the work of a thread. The tier may not answer, so
    only `run` waits for its bytes."""

    def __init__(self, *, queue: LoadQueue, slab: Slab, tier: str, make: MakeSource, completions: Events) -> None:
        """Set up. tier: "disk" or "redis". make: returns the source of a part of a load, from which its bytes are
        read."""
        self._queue, self._changed = queue, queue.changed
        self._slab, self._tier, self._make = slab, tier, make
        self._completions = completions
        self._landings = Landings()
        self._log = RareLog()

    def run(self) -> None:
        """Read the layers of loads from this tier into memory, until the queue of loads is closed and empty."""
        while (part := self._next()) is not None:
            started = time.perf_counter()
            source: LandedSource | None = None  # not the last part's, should this one's fail to be made
            failed, first, come, reason = {}, part.landed, 0, ""
            try:
                source = self._open(part)
                if source is not None:
                    come = source.read(first, part.reading, partial(self._on_landed, part))
            except BlockMissing as error:
                reason = error.reason
                addresses = [(block.key, block.extent or block.redis) for block in part.blocks]
                failed = {key: reason for key, where in addresses if where is None or error.concerns(*where)}
            except MEMORY_ERRORS as error:
                if not lacks_memory(error):
                    raise
                reason, failed = "memory", {block.key: "memory" for block in part.blocks}
                self._log.warn("memory", "%d blocks were not loaded, there was no memory: %s", len(failed), error)
            with self._changed:
                progress = part.progress(time.perf_counter())
                if progress is not None and reason in {"deadline", "io"}:
                    self.tell_not_transferred(part, progress)
                part.reading_s += time.perf_counter() - started
                part.landed_s = part.reading_s
                if part.has_ended:
                    if source is not None:
                        source.close()
                    continue
                part.load.failed.update(failed)
                part.landed = max(part.landed, first + come)
                part.reading = 0
                self._changed.notify_all()

    def tell_not_transferred(self, part: LoadPart, progress: LoadProgress) -> None:
        """Report that a part (a load's blocks from one tier) was not read in full, and how long the whole of it would
        have taken at its pace so far."""
        seconds = progress.whole_s(self._slab.num_layers)
        self._completions.tell(NotTransferred(f"{part.tier}_to_hbm", len(part.blocks) * self._slab.slot_bytes, seconds))

    def _next(self) -> LoadPart | None:
        with self._changed:
            part = self._queue.wait_next(partial(self._queue.next_to_read, self._tier))
            if part is not None:
                part.reading, part.asked_s = self._queue.may_land(part), time.perf_counter()
            return part

    def _open(self, part: LoadPart) -> LandedSource | None:
        """Return the source of a part; None if its load has failed, since its slots may then belong to others."""
        with self._changed:
            if part.source is None and not part.load.failed:
                part.source = self._make(part, self._landings)
            assert not isinstance(part.source, SlotSource)
            return part.source

    def _on_landed(self, part: LoadPart, count: int) -> int:
        """Note that `count` more layers were read. Returns how many to read next; 0, which ends the read, if the load
        has failed or another one is more urgent.

        The number to read next is that of the layers read but not yet written into HBM pages. Every call takes
        processor time from the step that computes meanwhile, and as long as there are layers to write, the next ones
        are not waited for.
        """
        with self._changed:
            part.landed += count
            part.landed_s = part.reading_s + time.perf_counter() - part.asked_s
            if self._queue.step_waits or not part.in_step:
                self._changed.notify_all()
            if part.load.failed or self._queue.gives_way(part):
                return 0
            return max(1, part.landed - part.placed)
