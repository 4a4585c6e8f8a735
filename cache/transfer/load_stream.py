"""Loads blocks from DRAM, disk or Redis into HBM, layer by layer (AttentionStore §3.2.1). One thread reads from disk,
one from Redis. Another places layers (writes them into pages of HBM); where the CPU copies, the step that waits for
them does."""

import logging
import time
from collections.abc import Sequence
from itertools import product

import torch

from reprise.cache.moves import BlockLoad, LoadBlocks
from reprise.cache.rates import LoadProgress
from reprise.cache.storage.slab import CodedSlab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer.coding import Decoder
from reprise.cache.transfer.device_streams import DeviceStream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.key_rotations import KeyRotations
from reprise.cache.transfer.layer_source import ExtentSource, layers_landed
from reprise.cache.transfer.load_placer import LoadPlacer
from reprise.cache.transfer.load_queue import LoadJob, LoadPart, LoadQueue
from reprise.cache.transfer.load_reader import LoadReader
from reprise.cache.transfer.loader import PagePool
from reprise.cache.transfer.slot_reader import SlotReader
from reprise.cache.transfer.stores import RemoteStreams, Stores
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.device_errors import lacks_memory

log = logging.getLogger(__name__)


class LoadStream:
    """The part of a Transfer that makes loads. `place` and the `run` of each reader are the work of threads; the
    engine's thread calls the other methods. The disk or Redis may fail to answer, so only their readers call them. The
    files that a load reads are closed by the thread that ends it, or by the reader if that is still reading then.

    Where the CPU does the copying, a load during a computation takes time from it: a product that is split evenly over
    all cores is as slow as the core that copies too. With 142 tokens after 1,600 in DRAM (125 M model, two cores),
    layers took up to 10 ms instead of 4. So in that case a step places its own blocks, each layer just before it
    attends, with all its threads and at the speed of memory; attention then finds them in the caches. A thread only has
    to ask the disk, which brings bytes to memory by itself.
    """

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        stores: Stores,
        remote: RemoteStreams | None = None,
        rotations: KeyRotations,
        read_buffer_layers: int,
        throttle: Throttle,
        compute: DeviceStream,
        completions: Events,
    ) -> None:
        """Set up. rotations, compute: the engine thread's. read_buffer_layers: how many layers may be loaded before the
        request runs; negative: all."""
        slab, coded, disk = stores.slab, stores.coded, stores.disk
        self._slab, self._coded = slab, coded
        self._pool = PagePool(pages)
        if self._pool.device.type == "cuda" and slab.num_slots:
            self._pool.compile_for(slab, rotations)
        if self._pool.has_team:
            self._decode_once(together=True)
        self._rotations, self._compute = rotations, compute
        self._read_buffer_layers = slab.num_layers if read_buffer_layers < 0 else read_buffer_layers
        self._throttle = throttle
        self._completions = completions
        self._changed = completions.changed
        self._queue = LoadQueue(
            num_layers=slab.num_layers, read_buffer_layers=self._read_buffer_layers, changed=self._changed
        )
        self.readers: dict[str, LoadReader] = {}
        """Tier -> its reader, whose `run` is the work of a thread."""
        if disk is not None:
            self.readers["disk"] = LoadReader(
                queue=self._queue,
                slab=slab,
                tier="disk",
                make=lambda part, landings: ExtentSource(part.blocks, slab, disk, landings, self._coded_of(part)),
                completions=completions,
            )
        if remote is not None:
            self.readers["redis"] = LoadReader(
                queue=self._queue,
                slab=slab,
                tier="redis",
                make=lambda part, landings: remote.source(part.blocks, landings, is_coded=part.is_coded),
                completions=completions,
            )
        self._placer = LoadPlacer(
            queue=self._queue, pool=self._pool, slab=slab, coded=coded, throttle=throttle, completions=completions
        )
        self.parts = self._queue.parts
        """The parts of all loads that have not ended. Read only."""
        self._loads: dict[int, LoadJob] = {}  # loads whose end the engine has not heard of
        self.waited_s = 0.0  # seconds that steps have waited for loads or spent on them

    def place(self, rotations: KeyRotations, stream: DeviceStream) -> None:
        """Place the layers of loads (write them into HBM pages) until `close`, except those that the step that needs
        them places itself. rotations, stream: the calling thread's."""
        if self._coded is not None and self._coded.decodes.device.type != "cpu":
            self._decode_once(together=False)
        self._placer.run(rotations, stream)

    def _decode_once(self, *, together: bool) -> None:
        """Decode an empty block once, so that compiling and setting up a device are done before the first real
        block."""
        if self._coded is None or not self._slab.num_slots:
            return
        nothing = torch.zeros(1, self._coded.segment_bytes[0], dtype=torch.uint8)
        try:
            Decoder(self._coded.decodes, self._slab, 1).decode(0, nothing, together=together)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            log.warning("the device has no memory to decode a block: what is coded is computed as long as that is so")

    def place_next(self, rotations: KeyRotations, stream: DeviceStream) -> bool:
        """Wait for the next layer that has arrived and write it into pages of HBM. Returns False if no more layers will
        come."""
        return self._placer.place_next(rotations, stream)

    def reader_of(self, blocks: Sequence[BlockLoad]) -> SlotReader:
        """Return a reader for parked blocks, which no load brings to HBM for good: whenever a step asks for it, the
        reader copies one layer of the blocks from their pinned DRAM slots to pages."""
        return SlotReader(blocks, slab=self._slab, pool=self._pool, rotations=self._rotations, throttle=self._throttle)

    def put(self, move: LoadBlocks, *, in_step: bool) -> None:
        """Queue a load, to be made after earlier ones. Until `start`, only its first few layers (the read buffer) are
        loaded. It writes to its pages only after all computation that was launched before this call. in_step: whether
        the next step uses the load. If so, and where the CPU does the copying, all layers are loaded, and the step
        itself writes them into HBM pages."""
        num_layers = self._slab.num_layers
        in_step = in_step and self._pool.has_team
        load = LoadJob(move.job_id, self._compute.fence(), started=in_step or self._read_buffer_layers >= num_layers)
        for tier, coded in product((*self.readers, "dram"), {None, self._coded}):
            is_coded = coded is not None
            blocks = tuple(block for block in move.blocks if block.tier == tier and block.is_coded == is_coded)
            if not blocks:
                continue
            part = LoadPart(blocks, load, num_layers, tier=tier, in_step=in_step, is_coded=is_coded)
            if tier == "dram":
                # Waiting for a link that is made slower is left to a thread.
                part.in_step, part.landed = in_step and not self._throttle.is_capped, num_layers
            else:
                part.ahead = layers_landed((self._slab if coded is None else coded).segment_bytes, len(blocks))
            load.parts.append(part)
        load.left = len(load.parts)
        self._loads[move.job_id] = load
        with self._changed:
            self._queue.parts += load.parts
            if any(part.is_far or not part.in_step for part in load.parts):
                self._changed.notify_all()

    def _coded_of(self, part: LoadPart) -> CodedSlab | None:
        return self._coded if part.is_coded else None

    def start(self, job_id: int) -> None:
        """Allow the layers beyond the read buffer (the first few layers, which may come before the request runs),
        because the request of a load runs now or does not wait for it any more."""
        load = self._loads.get(job_id)
        if load is not None and not load.started:
            with self._changed:
                load.started = True
                self._changed.notify_all()

    def abandon(self, job_id: int) -> None:
        """Give up the part of a load that the disk or Redis has not delivered, as AbandonLoad orders; do nothing if
        there is no such part. The blocks of that part have failed, with the reason "late". From now on no layer of the
        load is written into HBM pages. So the load ends, and its pages become free, without waiting for a read that
        hangs: that read can write only to its own memory on the host."""
        load = self._loads.get(job_id)
        with self._changed:
            now_s = time.perf_counter()
            late = [(part, progress) for part in self._queue.far_parts(load) if (progress := part.progress(now_s))]
            if load is None or not late:
                return
            load.is_abandoned = True
            for part, progress in late:
                load.failed.update((block.key, "late") for block in part.blocks if block.key not in load.failed)
                self.readers[part.tier].tell_not_transferred(part, progress)
            self._changed.notify_all()

    def progress(self, job_id: int) -> LoadProgress | None:
        """Return the progress of a load's disk or Redis reads: the slower of the two. None if it does not wait for
        them, because they read none of it, have read all, or have failed."""
        with self._changed:
            now_s = time.perf_counter()
            parts = self._queue.far_parts(self._loads.get(job_id))
            found = [progress for part in parts if (progress := part.progress(now_s)) is not None]
        return max(found, key=lambda progress: progress.left_s(self._slab.num_layers), default=None)

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Wait until layer `layer` of a load is in HBM or the load has failed and ended, for at most `timeout_s`
        seconds. Returns False if the time was over first. Layers that the step has to write into HBM pages itself are
        written here."""
        load = self._loads.get(job_id)
        if load is None or load.arrived > layer:
            return True
        started = time.monotonic()
        until = started + timeout_s
        # Place what lies in DRAM first, which gives the disk more time.
        for part in reversed(load.parts):
            while part.in_step and part.layers <= layer and self._may_be_placed(part, until):
                self._place_in_step(part)
        with self._changed:
            while load.arrived <= layer and (left_s := until - time.monotonic()) > 0:
                self._wait(left_s)
        self.waited_s += time.monotonic() - started
        return load.arrived > layer

    def _may_be_placed(self, part: LoadPart, until: float) -> bool:
        """Wait, at most until the time `until`, for the next layer of a part (a load's blocks from one tier) to be
        read. Returns whether it can be placed, that is written into HBM pages."""
        if part.landed > part.placed and not part.load.failed:
            return True
        with self._changed:
            while not part.has_come:
                if (left_s := until - time.monotonic()) <= 0:
                    return False
                self._wait(left_s)
        return True

    def _wait(self, left_s: float) -> None:
        """Wait on the engine's thread until something has changed, or at most for `left_s` or one second."""
        self._completions.check()
        self._queue.step_waits = True
        self._changed.wait(min(left_s, 1.0))
        self._queue.step_waits = False

    def _place_in_step(self, part: LoadPart) -> None:
        self._placer.place(part, self._rotations, self._compute, together=True)
        if part.is_over:
            self._placer.end(part)
        elif part.is_far and not part.reading and part.landed < self._slab.num_layers:
            with self._changed:
                self._changed.notify_all()  # there is room for another layer

    def leave_to_threads(self) -> None:
        """Let the placing thread write into HBM pages the layers that steps were to write themselves, because no step
        waits for loads any more."""
        if not self._queue.parts:
            return
        with self._changed:
            for part in [part for part in self._queue.parts if part.in_step]:
                part.in_step = False
                self._changed.notify_all()

    def layers_arrived(self, job_id: int) -> int:
        """Return how many layers of a load, counted from the first, are in HBM; all of them once the load has ended,
        even if it has failed. Returns 0 for a load that was not queued or was forgotten (`forget`)."""
        load = self._loads.get(job_id)
        return 0 if load is None else load.arrived

    def forget(self, job_id: int) -> None:
        """Forget a load, because the engine has been told of its end."""
        del self._loads[job_id]

    def close(self) -> None:
        """Let the threads finish the queued loads and end."""
        self.leave_to_threads()
        with self._changed:
            self._queue.closing = True
            self._changed.notify_all()
