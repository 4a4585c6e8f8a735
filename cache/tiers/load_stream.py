"""The load stream: DRAM or disk -> HBM, layer by layer (AttentionStore §3.2.1), on threads of its own and, where the
processors copy, in the step that waits for it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from cache.block import BlockKey
from cache.plan import BlockLoad, LoadBlocks, Loaded, Transferred
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
class _Part:
    """The blocks of a load that lie in DRAM, or those on disk, or all where both come in the same way. Its layers are
    brought, and it is ended, by the step that stands on them if `in_step`, else by a thread. The engine's thread alone
    changes that, and only to false."""

    blocks: tuple[BlockLoad, ...]
    load: "_Load"
    reads_disk: bool
    in_step: bool
    layers: int = 0  # leading ones that have arrived
    work: _Work | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """A move under way."""

    job_id: int
    started: bool  # its request runs, or has given its pages back: layers beyond the read buffer may come
    parts: list[_Part] = field(default_factory=list)
    failed: dict[BlockKey, str] = field(default_factory=dict)  # then nothing more comes
    left: int = 0  # parts that are not at their end


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
        self._loads: dict[int, _Load] = {}  # those whose end was not heard
        self._parts: list[_Part] = []  # those not at their end, in the order they were given
        self._closing = False
        self.waited_s = 0.0  # seconds that steps have waited for loads or spent on them

    def put(self, move: LoadBlocks, *, in_step: bool) -> None:
        """To be loaded when those before it are, as far as the read buffer lets it. in_step: the next step stands on
        it, and brings it by itself if it can."""
        on_disk = tuple(block for block in move.blocks if block.extent is not None)
        in_dram = tuple(block for block in move.blocks if block.extent is None)
        # Who waits for a device, or for a link that is made slower, does so on a thread.
        in_step = in_step and self._pool.has_team and bool(in_dram) and not self._throttle.is_capped
        load = _Load(move.job_id, started=in_step or self._read_buffer_layers >= self._slab.num_layers)
        if in_step:
            load.parts.append(_Part(in_dram, load, reads_disk=False, in_step=True))
        if on_disk or not in_step:
            blocks = on_disk if in_step else move.blocks
            load.parts.append(_Part(blocks, load, reads_disk=bool(on_disk), in_step=False))
        load.left = len(load.parts)
        self._loads[move.job_id] = load
        with self._changed:
            self._parts += load.parts
            if on_disk or not in_step:
                self._changed.notify_all()

    def start(self, job_id: int) -> None:
        """The request of a load runs now, or waits for it no longer: what is behind the read buffer may come."""
        load = self._loads.get(job_id)
        if load is not None and not load.started:
            with self._changed:
                load.started = True
                self._changed.notify_all()

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Whether layer `layer` of a load has arrived, or has failed to, within that time. What the step brings by
        itself is there when this returns."""
        load = self._loads.get(job_id)
        if load is None or self._arrived(load) > layer:
            return True
        started = time.monotonic()
        for part in load.parts:
            while part.in_step and part.layers <= layer:
                self._bring_in_step(part)
        with self._changed:
            while self._arrived(load) <= layer and (left_s := started + timeout_s - time.monotonic()) > 0:
                self._completions.check()
                self._changed.wait(min(left_s, 1.0))
        self.waited_s += time.monotonic() - started
        return self._arrived(load) > layer

    @staticmethod
    def _arrived(load: _Load) -> int:
        return min([part.layers for part in load.parts])

    def _bring_in_step(self, part: _Part) -> None:
        """The next layer of what lies in DRAM."""
        if part.work is None:
            part.work = self._begin(part, None)
        self._place(part, part.work, self._rotations, together=True)
        if part.load.failed or part.work.placed == self._slab.num_layers:
            self._end(part, part.work)

    def leave_to_threads(self) -> None:
        """No step waits for loads any more: what steps have not brought by themselves, the threads will."""
        if not self._parts:
            return
        with self._changed:
            for part in [part for part in self._parts if part.in_step]:
                part.in_step = False
                self._changed.notify_all()

    def layers_arrived(self, job_id: int) -> int:
        """Of a load whose end was not heard yet; none of one that is decided on but was not ordered."""
        load = self._loads.get(job_id)
        return 0 if load is None else self._arrived(load)

    def forget(self, job_id: int) -> None:
        """Its end was heard."""
        del self._loads[job_id]

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
            while (part := self._next(from_disk)) is not None:
                work = part.work = part.work or self._begin(part, ahead)
                self._read(part, work)
                self._place(part, work, rotations, together=False)
                if part.load.failed or work.placed == self._slab.num_layers:
                    self._end(part, work)

    def _next(self, from_disk: bool) -> _Part | None:
        """Waits for a load that may bring its next layer: one that runs, else one whose read buffer has room. None at
        the end."""
        with self._changed:
            while True:
                parts = [part for part in self._parts if part.reads_disk == from_disk]
                if self._closing and not parts:
                    return None
                parts = [part for part in parts if not part.in_step]
                for part in parts:
                    if part.load.started or self._closing:
                        return part
                for part in parts:
                    if part.layers < self._read_buffer_layers:
                        return part
                self._changed.wait(1.0)

    def _begin(self, part: _Part, ahead: Executor | None) -> _Work:
        resources = ExitStack()
        source = resources.enter_context(LayerSource(part.blocks, self._slab, self._disk))
        part.load.failed.update(dict.fromkeys(source.unsealed, "checksum"))

        def read(layer: int) -> None:
            passed = self._throttle.book(source.dram_bytes(layer))
            source.read(layer)
            self._throttle.wait(passed)

        if ahead is not None:
            reader = ReadAhead(read, self._slab.num_layers, ahead)
            resources.callback(reader.close)  # before the source is closed
            read = reader.read
        return _Work(source, Loader(blocks=part.blocks, source=source, pool=self._pool), read, resources)

    def _read(self, part: _Part, work: _Work) -> None:
        """The next layer, unless the load has failed."""
        if part.load.failed:
            return
        started = time.perf_counter()
        try:
            work.read(work.placed)
        except BlockMissing as error:
            for block in part.blocks:
                if block.extent is not None:
                    part.load.failed.setdefault(block.key, error.reason)
        work.reading_s += time.perf_counter() - started

    def _place(self, part: _Part, work: _Work, rotations: Rotations, *, together: bool) -> None:
        """The next layer, unless the load has failed."""
        if part.load.failed:
            return
        started = time.perf_counter()
        # Notes of its own: the other part may be noting as well.
        failed: dict[BlockKey, str] = {}
        work.loader.place(work.placed, failed, rotations, together=together)
        self._synchronise()
        work.placing_s += time.perf_counter() - started
        if failed:
            part.load.failed.update(failed)
            return
        with self._changed:
            work.placed += 1
            # The last one counts when the event is out: whoever waits for it may then believe the event.
            part.layers = min(work.placed, self._slab.num_layers - 1)
            if not together:
                self._changed.notify_all()

    def _end(self, part: _Part, work: _Work) -> None:
        """A part has ended, in whatever way; with the last one, tell that the load has."""
        failed = part.load.failed
        if not failed:
            work.source.seal_passed()
            for direction, (size, seconds) in work.source.account(work.reading_s, work.placing_s).items():
                self._completions.tell(Transferred(direction, size, seconds))
        work.resources.close()
        with self._changed:
            self._parts.remove(part)
            part.load.left -= 1
            if not part.load.left:
                self._completions.tell(Loaded(part.load.job_id, failed))
            part.layers = self._slab.num_layers
            if not part.in_step:
                self._changed.notify_all()

    def _synchronise(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
