"""The load stream: DRAM or disk -> HBM, layer by layer (AttentionStore §3.2.1), on threads of its own and, where the
processors copy, in the step that waits for it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from cache.block import BlockKey
from cache.plan import LoadBlocks, Loaded, Transferred
from cache.tiers.base import BlockMissing
from cache.tiers.completions import Completions
from cache.tiers.disk import DiskTier
from cache.tiers.dram import Slab
from cache.tiers.layer_source import LayerSource, ReadAhead
from cache.tiers.loader import Loader, PagePool
from cache.tiers.rotations import Rotations
from cache.tiers.throttle import Throttle
from kernels.attention.base import KvPages


@dataclass(slots=True)
class _Work:
    """What a load is done with, from its beginning on."""

    source: LayerSource
    loader: Loader
    read: Callable[[int], None]  # a layer off the disk
    resources: ExitStack
    placed: int = 0  # leading layers
    reading_s: float = 0.0
    placing_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    """A load. Its layers are brought, and it is ended, by the step that stands on it if `in_step`, else by a thread.
    The engine's thread alone changes that, and only to false."""

    move: LoadBlocks
    reads_disk: bool
    in_step: bool
    started: bool  # its request runs, or has given its pages back: layers beyond the read buffer may come
    layers: int = 0  # leading ones that have arrived
    failed: dict[BlockKey, str] = field(default_factory=dict)  # then nothing more comes
    work: _Work | None = None


class LoadStream:
    """`run` is a thread, one for loads that read the disk and one for those that do not, for a disk may not answer; the
    other methods are called by the engine's.

    Where processors do the copying, a load beside a computation takes from it: a product that is split evenly over all
    cores is as slow as the core that copies too. 142 tokens behind 1,600 in DRAM, 125 M model, two cores: layers took
    up to 10 ms instead of 4. So there a step brings what lies in DRAM by itself, each layer just before it attends,
    with all its threads and at the speed of memory; attention then finds it in the caches.
    """

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        slab: Slab,
        disk: DiskTier | None,
        rotations: Rotations,
        read_buffer_layers: int,
        throttle: Throttle,
        completions: Completions,
    ) -> None:
        """rotations: for the engine's thread. read_buffer_layers: how many may come before the request runs; negative:
        all."""
        self._slab, self._disk = slab, disk
        self._pool = PagePool(pages)
        self._rotations = rotations
        self._read_buffer_layers = slab.num_layers if read_buffer_layers < 0 else read_buffer_layers
        self._throttle = throttle
        self._completions = completions
        self._changed = completions.changed
        self._jobs: dict[int, _Job] = {}  # those whose end was not heard
        self._loads: list[_Job] = []  # those not at their end, in the order they were given
        self._closing = False
        self.waited_s = 0.0  # seconds that steps have waited for loads or spent on them

    def put(self, move: LoadBlocks, *, in_step: bool) -> None:
        """To be loaded when those before it are, as far as the read buffer lets it. in_step: the next step stands on
        it, and brings it by itself if it can."""
        reads_disk = any(block.extent is not None for block in move.blocks)
        # Who waits for a device, or for a link that is made slower, does so on a thread.
        in_step = in_step and self._pool.has_team and not reads_disk and not self._throttle.is_capped
        started = in_step or self._read_buffer_layers >= self._slab.num_layers
        job = self._jobs[move.job_id] = _Job(move, reads_disk, in_step, started)
        with self._changed:
            self._loads.append(job)
            if not in_step:
                self._changed.notify_all()

    def start(self, job_id: int) -> None:
        """The request of a load runs now, or waits for it no longer: what is behind the read buffer may come."""
        job = self._jobs.get(job_id)
        if job is not None and not job.started:
            with self._changed:
                job.started = True
                self._changed.notify_all()

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Whether layer `layer` of a load has arrived, or has failed to, within that time. What the step brings by
        itself is there when this returns."""
        job = self._jobs.get(job_id)
        if job is None or job.layers > layer:
            return True
        started = time.monotonic()
        while job.in_step and job.layers <= layer:
            self._bring_in_step(job)
        with self._changed:
            while job.layers <= layer and (left_s := started + timeout_s - time.monotonic()) > 0:
                self._completions.check()
                self._changed.wait(min(left_s, 1.0))
        self.waited_s += time.monotonic() - started
        return job.layers > layer

    def _bring_in_step(self, job: _Job) -> None:
        """The next layer of a load."""
        if job.work is None:
            job.work = self._begin(job, None)
        self._place(job, job.work, self._rotations, together=True)
        if job.failed or job.work.placed == self._slab.num_layers:
            self._end(job, job.work)

    def leave_to_threads(self) -> None:
        """No step waits for loads any more: what steps have not brought by themselves, the threads will."""
        if not self._loads:
            return
        with self._changed:
            for job in [job for job in self._loads if job.in_step]:
                job.in_step = False
                self._changed.notify_all()

    def layers_arrived(self, job_id: int) -> int:
        """Of a load whose end was not heard yet; none of one that is decided on but was not ordered."""
        job = self._jobs.get(job_id)
        return 0 if job is None else job.layers

    def forget(self, job_id: int) -> None:
        """Its end was heard."""
        del self._jobs[job_id]

    def close(self) -> None:
        """Let the threads bring what they were given, and end."""
        self.leave_to_threads()
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def run(self, rotations: Rotations, *, from_disk: bool) -> None:
        """Loads of one kind until `close`."""
        with ExitStack() as stack:
            ahead = stack.enter_context(ThreadPoolExecutor(1, "kv-read-ahead")) if from_disk else None
            while (job := self._next(from_disk)) is not None:
                work = job.work = job.work or self._begin(job, ahead)
                self._read(job, work)
                self._place(job, work, rotations, together=False)
                if job.failed or work.placed == self._slab.num_layers:
                    self._end(job, work)

    def _next(self, from_disk: bool) -> _Job | None:
        """Waits for a load that may bring its next layer: one that runs, else one whose read buffer has room. None at
        the end."""
        with self._changed:
            while True:
                loads = [job for job in self._loads if job.reads_disk == from_disk]
                if self._closing and not loads:
                    return None
                loads = [job for job in loads if not job.in_step]
                for job in loads:
                    if job.started or self._closing:
                        return job
                for job in loads:
                    if job.layers < self._read_buffer_layers:
                        return job
                self._changed.wait(1.0)

    def _begin(self, job: _Job, ahead: Executor | None) -> _Work:
        resources = ExitStack()
        source = resources.enter_context(LayerSource(job.move.blocks, self._slab, self._disk))
        job.failed.update(dict.fromkeys(source.unsealed, "checksum"))

        def read(layer: int) -> None:
            passed = self._throttle.book(source.dram_bytes(layer))
            source.read(layer)
            self._throttle.wait(passed)

        if ahead is not None:
            reader = ReadAhead(read, self._slab.num_layers, ahead)
            resources.callback(reader.close)  # before the source is closed
            read = reader.read
        return _Work(source, Loader(blocks=job.move.blocks, source=source, pool=self._pool), read, resources)

    def _read(self, job: _Job, work: _Work) -> None:
        """The next layer, unless the load has failed."""
        if job.failed:
            return
        started = time.perf_counter()
        try:
            work.read(work.placed)
        except BlockMissing as error:
            for block in job.move.blocks:
                if block.extent is not None:
                    job.failed.setdefault(block.key, error.reason)
        work.reading_s += time.perf_counter() - started

    def _place(self, job: _Job, work: _Work, rotations: Rotations, *, together: bool) -> None:
        """The next layer, unless the load has failed."""
        if job.failed:
            return
        started = time.perf_counter()
        work.loader.place(work.placed, job.failed, rotations, together=together)
        self._synchronise()
        work.placing_s += time.perf_counter() - started
        if job.failed:
            return
        with self._changed:
            work.placed += 1
            # The last one counts when the event is out: whoever waits for it may then believe the event.
            job.layers = min(work.placed, self._slab.num_layers - 1)
            if not together:
                self._changed.notify_all()

    def _end(self, job: _Job, work: _Work) -> None:
        """Tell that a load has ended, in whatever way."""
        if not job.failed:
            work.source.seal_passed()
            for direction, (size, seconds) in work.source.account(work.reading_s, work.placing_s).items():
                self._completions.tell(Transferred(direction, size, seconds))
        work.resources.close()
        self._completions.tell(Loaded(job.move.job_id, job.failed))
        with self._changed:
            self._loads.remove(job)
            job.layers = self._slab.num_layers
            if not job.in_step:
                self._changed.notify_all()

    def _synchronise(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
