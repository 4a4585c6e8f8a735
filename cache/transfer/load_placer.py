"""Writes the layers of loads into pages of HBM, and reports when a load has ended."""

import time
from functools import partial

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.moves import NOT_ITS_COPY, Loaded, Transferred
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer.device_streams import DeviceStream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.key_rotations import KeyRotations
from reprise.cache.transfer.layer_source import LandedSource, SlotSource, slot_source
from reprise.cache.transfer.load_queue import LoadPart, LoadQueue
from reprise.cache.transfer.loader import Loader, PagePool
from reprise.kernels.device_errors import MEMORY_ERRORS, lacks_memory


class LoadPlacer:
    """A placer of layers (it writes them into pages of HBM) for a LoadStream. `run` is the work of a thread. That
    thread and the engine's call `place` and `end`, each for its own parts of loads (`LoadPart.in_step`)."""

    def __init__(
        self,
        *,
        queue: LoadQueue,
        pool: PagePool,
        slab: Slab,
        coded: CodedSlab | None,
        throttle: Throttle,
        completions: Events,
    ) -> None:
        self._queue, self._changed = queue, queue.changed
        self._pool, self._slab, self._coded = pool, slab, coded
        self._throttle = throttle
        self._completions = completions
        self._log = RareLog()

    def run(self, rotations: KeyRotations, stream: DeviceStream) -> None:
        """Place the layers of loads (write them into HBM pages) until the queue is closed, except those that the step
        that needs them places itself. rotations, stream: the calling thread's."""
        while self.place_next(rotations, stream):
            pass

    def place_next(self, rotations: KeyRotations, stream: DeviceStream) -> bool:
        """Wait for the next layer's KV, rotate its keys and copy it to its pages. Return False if no more layers will
        come."""
        with self._changed:
            part = self._queue.wait_next(self._queue.next_to_place)
        if part is None:
            return False
        if not part.is_far and not part.load.failed:
            started = time.perf_counter()
            slots = self._coded if part.is_coded and self._coded is not None else self._slab
            size = len(part.blocks) * slots.segment_bytes[part.placed]
            self._throttle.wait(self._throttle.book(size))
            part.reading_s += time.perf_counter() - started
        self.place(part, rotations, stream, together=False)
        if part.is_over:
            self.end(part)
        return True

    def place(self, part: LoadPart, rotations: KeyRotations, stream: DeviceStream, *, together: bool) -> None:
        """Place the next layer of a part (write it into HBM pages), unless the load has failed. part: a load's blocks
        from one tier. rotations, stream: the calling thread's. together: whether to use torch's team of threads."""
        if part.load.failed:
            return
        started = time.perf_counter()
        # Notes of its own: the other part may be noting as well.
        failed: dict[BlockKey, str] = {}
        source, loader = self._begun(part, failed)
        layer = part.placed
        if not failed:
            try:
                failed.update(dict.fromkeys(source.prepare(layer, together=together), "checksum"))
                if not failed:
                    stream.follow(part.load.after)
                    stream.launch(partial(loader.place, layer, failed, rotations, together=together))
                    stream.fence().wait()
                if isinstance(source, LandedSource) and not failed:
                    source.keep(layer)
            except MEMORY_ERRORS as error:
                if not lacks_memory(error):
                    raise
                failed.update(dict.fromkeys((block.key for block in source.blocks), "memory"))
                self._log.warn("memory", "%d blocks were not loaded, there was no memory: %s", len(failed), error)
        if isinstance(source, LandedSource) and failed:
            source.tell_damage([key for key, reason in failed.items() if reason not in NOT_ITS_COPY], layer)
        part.placing_s += time.perf_counter() - started
        with self._changed:
            if failed:
                part.load.failed.update(failed)
                return
            part.placed += 1
            # The last one counts only once the event is out, so that a thread that waits for it can rely on the event.
            part.layers = min(part.placed, self._slab.num_layers - 1)
            if not together:
                self._changed.notify_all()

    def end(self, part: LoadPart) -> None:
        """End a part, which is a load's blocks from one tier, after it was written into HBM pages or has failed. After
        the last part of a load, report that the load has ended."""
        failed = part.load.failed
        if part.placed == self._slab.num_layers:
            part.load.whole.update(block.key for block in part.blocks)
        with self._changed:
            part.has_ended = True
            is_read = part.reading > 0
        if isinstance(part.source, LandedSource) and not is_read:
            if not failed:
                part.source.seal()
            part.source.close()
        if not failed:
            self._tell_transferred(part)
        with self._changed:
            self._queue.parts.remove(part)
            part.load.left -= 1
            if not part.load.left:
                whole = frozenset(part.load.whole if failed else ())
                self._completions.tell(Loaded(part.load.job_id, failed, whole))
            part.layers = self._slab.num_layers
            if not part.in_step:
                self._changed.notify_all()

    def _tell_transferred(self, part: LoadPart) -> None:
        direction = f"{part.blocks[0].source}_to_hbm"
        size = len(part.blocks) * self._slab.slot_bytes
        # One layer is read while another is placed: all but one layer of the shorter is hidden by the longer.
        shorter, longer = sorted((part.reading_s, part.placing_s))
        hidden = 1 - 1 / self._slab.num_layers if part.is_far else 0
        self._completions.tell(Transferred(direction, size, longer + shorter * (1 - hidden)))

    def _begun(self, part: LoadPart, failed: dict[BlockKey, str]) -> tuple[SlotSource | LandedSource, Loader]:
        if part.source is None:
            part.source = slot_source(part.blocks, self._slab, self._coded if part.is_coded else None)
            failed.update(dict.fromkeys(part.source.unsealed, "checksum"))
        if part.loader is None:
            part.loader = Loader(source=part.source, pool=self._pool)
        return part.source, part.loader
