"""The load stream: DRAM or disk -> HBM, layer by layer (AttentionStore §3.2.1), on a thread of its own."""

import time
from collections.abc import Iterator, Sequence
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
class _Job:
    """A load: how many leading layers have arrived."""

    move: LoadBlocks
    started: bool  # its request runs, or has given its pages back: layers beyond the read buffer may come
    layers: int = 0
    failed: dict[BlockKey, str] = field(default_factory=dict)
    steps: Iterator[None] | None = None  # each brings a layer
    reads_disk: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reads_disk = any(block.extent is not None for block in self.move.blocks)


class LoadStream:
    """`run` is a thread, one for loads that read the disk and one for those that do not, for a disk may not answer; the
    other methods are called by the engine's."""

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        slab: Slab,
        disk: DiskTier | None,
        read_buffer_layers: int,
        throttle: Throttle,
        completions: Completions,
    ) -> None:
        """read_buffer_layers: how many may come before the request runs; negative: all."""
        self._slab, self._disk = slab, disk
        self._pool = PagePool(pages)
        self._read_buffer_layers = slab.num_layers if read_buffer_layers < 0 else read_buffer_layers
        self._throttle = throttle
        self._completions = completions
        self._changed = completions.changed
        self._jobs: dict[int, _Job] = {}  # those whose end was not heard
        self._loads: list[_Job] = []  # those not at their end, in the order they were given
        self._closing = False
        self.waited_s = 0.0  # seconds that steps have waited for loads

    def put(self, move: LoadBlocks) -> None:
        """To be loaded when those before it are, as far as the read buffer lets it."""
        job = self._jobs[move.job_id] = _Job(move, started=self._read_buffer_layers >= self._slab.num_layers)
        with self._changed:
            self._loads.append(job)
            self._changed.notify_all()

    def start(self, job_id: int) -> None:
        """The request of a load runs now, or waits for it no longer: what is behind the read buffer may come."""
        job = self._jobs.get(job_id)
        if job is not None and not job.started:
            with self._changed:
                job.started = True
                self._changed.notify_all()

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Whether layer `layer` of a load has arrived, or has failed to, within that time."""
        job = self._jobs.get(job_id)
        if job is None or job.layers > layer:
            return True
        started = time.monotonic()
        with self._changed:
            while job.layers <= layer and (left_s := started + timeout_s - time.monotonic()) > 0:
                self._completions.check()
                self._changed.wait(min(left_s, 1.0))
        self.waited_s += time.monotonic() - started
        return job.layers > layer

    def layers_arrived(self, job_id: int) -> int:
        """Of a load whose end was not heard yet; none of one that is decided on but was not ordered."""
        job = self._jobs.get(job_id)
        return 0 if job is None else job.layers

    def forget(self, job_id: int) -> None:
        """Its end was heard."""
        del self._jobs[job_id]

    def close(self) -> None:
        """Let the thread bring what it was given, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def run(self, rotations: Rotations, *, from_disk: bool) -> None:
        """Loads of one kind until `close`."""
        with ExitStack() as stack:
            ahead = stack.enter_context(ThreadPoolExecutor(1, "kv-read-ahead")) if from_disk else None
            self._run(rotations, from_disk, ahead)

    def _run(self, rotations: Rotations, from_disk: bool, ahead: Executor | None) -> None:
        while (job := self._next(from_disk)) is not None:
            if job.steps is None:
                job.steps = self._load(job, rotations, ahead)
            try:
                next(job.steps)
                continue
            except StopIteration:
                pass
            except BlockMissing as error:
                for block in job.move.blocks:
                    if block.extent is not None:
                        job.failed.setdefault(block.key, error.reason)
            self._completions.tell(Loaded(job.move.job_id, job.failed))
            with self._changed:
                self._loads.remove(job)
                job.layers = self._slab.num_layers
                self._changed.notify_all()

    def _next(self, from_disk: bool) -> _Job | None:
        """Waits for a load that may bring its next layer: one that runs, else one whose read buffer has room. None at
        the end."""
        with self._changed:
            while True:
                loads = [job for job in self._loads if job.reads_disk == from_disk]
                if self._closing and not loads:
                    return None
                for job in loads:
                    if job.started or self._closing:
                        return job
                for job in loads:
                    if job.layers < self._read_buffer_layers:
                        return job
                self._changed.wait(1.0)

    def _load(self, job: _Job, rotations: Rotations, ahead: Executor | None) -> Iterator[None]:
        """Brings a layer whenever it is asked to go on. Raises BlockMissing."""
        seconds = {"dram_to_hbm": 0.0, "disk_to_hbm": 0.0}
        with ExitStack() as stack:
            source = stack.enter_context(LayerSource(job.move.blocks, self._slab, self._disk))

            def read(layer: int, failed: dict[BlockKey, str]) -> None:
                passed = self._throttle.book(source.dram_bytes(layer))
                source.read(layer, failed)
                self._throttle.wait(passed)

            if ahead is not None:
                reader = ReadAhead(read, self._slab.num_layers, ahead)
                stack.callback(reader.close)  # before the source is closed
                read = reader.read
            loader = Loader(blocks=job.move.blocks, source=source, pool=self._pool, rotations=rotations)
            share = source.disk_share
            for layer in range(self._slab.num_layers):
                started = time.perf_counter()
                read(layer, job.failed)
                came = time.perf_counter()
                if job.failed:
                    return
                loader.place(layer)
                self._synchronise()
                ended = time.perf_counter()
                with self._changed:
                    # The last one counts when the event is out: whoever waits for it may then believe the event.
                    job.layers = min(layer + 1, self._slab.num_layers - 1)
                    self._changed.notify_all()
                seconds["disk_to_hbm"] += (came - started) * (1 if share else 0) + (ended - came) * share
                seconds["dram_to_hbm"] += (came - started) * (0 if share else 1) + (ended - came) * (1 - share)
                yield
            source.seal_passed()
        for direction, size in source.total_bytes().items():
            self._completions.tell(Transferred(direction, size, seconds[direction]))

    def _synchronise(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
