"""The load stream: DRAM or disk -> HBM, layer by layer (AttentionStore §3.2.1): a thread reads off the disk, another
places in HBM, or, where processors copy, the step that waits for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from cache.blocks.keys import BlockKey
from cache.moves import BlockLoad, Late, LoadBlocks, Loaded, Transferred
from cache.rates import LoadProgress
from cache.storage.errors import BlockMissing
from cache.storage.extent_store import ExtentStore
from cache.storage.slab import Slab
from cache.storage.throttle import Throttle
from cache.transfer.events import Events
from cache.transfer.key_rotations import KeyRotations
from cache.transfer.layer_source import ExtentSource, Landings, SlotSource, layers_landed
from cache.transfer.loader import Loader, PagePool
from kernels.attention.ragged_batch import KvPages


@dataclass(slots=True, eq=False)
class _Part:
    """The blocks of a load that lie in DRAM, or those on disk. Its layers are placed, and it is ended, by the step that
    stands on them if `in_step`, else by the thread that places. The engine's thread alone changes that, and only to
    false."""

    blocks: tuple[BlockLoad, ...]
    load: "_Load"
    reads_disk: bool
    in_step: bool
    landed: int = 0  # leading layers that may be placed
    reading: int = 0  # how many a thread has set out to read, until it has ended
    has_ended: bool = False  # while it was read: who reads closes its source
    ahead: int = 0  # how many may have landed without having been placed
    layers: int = 0  # leading ones that have arrived
    placed: int = 0  # the same, but that all of them count
    source: SlotSource | ExtentSource | None = None
    loader: Loader | None = None
    reading_s: float = 0.0
    placing_s: float = 0.0
    asked_s: float = 0.0  # when a thread set out to read what is being read
    landed_s: float = 0.0  # the part of reading_s until the last layer has landed, that of the present read too


@dataclass(slots=True, eq=False)
class _Load:
    """A move under way."""

    job_id: int
    started: bool  # its request runs, or has given its pages back: layers beyond the read buffer may come
    parts: list[_Part] = field(default_factory=list)
    failed: dict[BlockKey, str] = field(default_factory=dict)  # then nothing more comes
    is_abandoned: bool = False  # so nobody waits for a read of it to end
    whole: set[BlockKey] = field(default_factory=set)  # blocks of which all layers are in place
    left: int = 0  # parts that are not at their end


class LoadStream:
    """`read` and `place` are threads; the other methods are called by the engine's. The disk may not answer: nobody but
    `read` waits for its bytes. Descriptors are closed by whoever ends a load.

    Where processors do the copying, a load beside a computation takes from it: a product that is split evenly over all
    cores is as slow as the core that copies too. 142 tokens behind 1,600 in DRAM, 125 M model, two cores: layers took
    up to 10 ms instead of 4. So there a step places by itself what it stands on, each layer just before it attends,
    with all its threads and at the speed of memory; attention then finds it in the caches. What is left to a thread is
    to ask the disk, which brings bytes to memory by itself.
    """

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        slab: Slab,
        disk: ExtentStore | None,
        rotations: KeyRotations,
        read_buffer_layers: int,
        throttle: Throttle,
        completions: Events,
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
        self._landings = Landings()
        self._loads: dict[int, _Load] = {}  # those whose end was not heard
        self._parts: list[_Part] = []  # those not at their end, in the order they were given
        self._closing = False
        self._step_waits = False  # the engine's thread, for a layer: otherwise nobody need wake for those it places
        self.waited_s = 0.0  # seconds that steps have waited for loads or spent on them

    def put(self, move: LoadBlocks, *, in_step: bool) -> None:
        """To be loaded when those before it are, as far as the read buffer lets it. in_step: the next step stands on
        it, and places it by itself if it can."""
        on_disk = tuple(block for block in move.blocks if block.extent is not None)
        in_dram = tuple(block for block in move.blocks if block.extent is None)
        in_step = in_step and self._pool.has_team
        load = _Load(move.job_id, started=in_step or self._read_buffer_layers >= self._slab.num_layers)
        if on_disk:
            ahead = layers_landed(self._slab, len(on_disk))
            load.parts.append(_Part(on_disk, load, reads_disk=True, in_step=in_step, ahead=ahead))
        if in_dram:
            # Who waits for a link that is made slower does so on a thread.
            together = in_step and not self._throttle.is_capped
            load.parts.append(_Part(in_dram, load, reads_disk=False, in_step=together, landed=self._slab.num_layers))
        load.left = len(load.parts)
        self._loads[move.job_id] = load
        with self._changed:
            self._parts += load.parts
            if any(part.reads_disk or not part.in_step for part in load.parts):
                self._changed.notify_all()

    def start(self, job_id: int) -> None:
        """The request of a load runs now, or waits for it no longer: what is behind the read buffer may come."""
        load = self._loads.get(job_id)
        if load is not None and not load.started:
            with self._changed:
                load.started = True
                self._changed.notify_all()

    def abandon(self, job_id: int) -> None:
        """See AbandonLoad. Pages are written by who places alone, and that is nobody for a load that has failed, so a
        read that hangs holds up neither the load's end nor its pages."""
        load = self._loads.get(job_id)
        part = next((part for part in self._parts if part.load is load and part.reads_disk), None)
        if load is None or part is None:
            return
        with self._changed:
            progress = self._progress(part)
            if progress is None or part.placed == self._slab.num_layers:
                return
            load.is_abandoned = True
            load.failed.update((block.key, "late") for block in part.blocks if block.key not in load.failed)
            self._tell_late(part, progress)
            self._changed.notify_all()

    def progress(self, job_id: int) -> LoadProgress | None:
        """Of what a load has on disk. None: nothing, or all of it has come, or the load has failed."""
        load = self._loads.get(job_id)
        with self._changed:
            part = next((part for part in self._parts if part.load is load and part.reads_disk), None)
            return None if part is None else self._progress(part)

    def _progress(self, part: _Part) -> LoadProgress | None:
        if part.load.failed or part.landed == self._slab.num_layers:
            return None
        reading_s = part.reading_s + (time.perf_counter() - part.asked_s if part.reading else 0.0)
        return LoadProgress(part.landed, part.landed_s, reading_s - part.landed_s)

    def _tell_late(self, part: _Part, progress: LoadProgress) -> None:
        seconds = progress.whole_s(self._slab.num_layers)
        self._completions.tell(Late("disk_to_hbm", len(part.blocks) * self._slab.slot_bytes, seconds))

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Whether layer `layer` of a load has arrived, or has failed to, within that time. What the step places by
        itself is there when this returns."""
        load = self._loads.get(job_id)
        if load is None or self._arrived(load) > layer:
            return True
        started = time.monotonic()
        until = started + timeout_s
        # What lies in DRAM first: the disk has so much longer.
        for part in reversed(load.parts):
            while part.in_step and part.layers <= layer and self._may_be_placed(part, until):
                self._place_in_step(part)
        with self._changed:
            while self._arrived(load) <= layer and (left_s := until - time.monotonic()) > 0:
                self._wait(left_s)
        self.waited_s += time.monotonic() - started
        return self._arrived(load) > layer

    @staticmethod
    def _arrived(load: _Load) -> int:
        return min([part.layers for part in load.parts])

    def _may_be_placed(self, part: _Part, until: float) -> bool:
        """Waits until the next layer of a part has come off the disk, or its load has failed."""
        if part.landed > part.placed and not part.load.failed:
            return True
        with self._changed:
            while not self._has_come(part):
                if (left_s := until - time.monotonic()) <= 0:
                    return False
                self._wait(left_s)
        return True

    def _wait(self, left_s: float) -> None:
        """The engine's thread, for something to have come."""
        self._completions.check()
        self._step_waits = True
        self._changed.wait(min(left_s, 1.0))
        self._step_waits = False

    @staticmethod
    def _has_come(part: _Part) -> bool:
        if part.load.failed:
            return not part.reading or part.load.is_abandoned
        return part.landed > part.placed

    def _is_over(self, part: _Part) -> bool:
        # The other part may fail at any time, and what is being read must not be taken away from who reads it.
        return part.placed == self._slab.num_layers or (bool(part.load.failed) and self._has_come(part))

    def _place_in_step(self, part: _Part) -> None:
        self._place(part, self._rotations, together=True)
        if self._is_over(part):
            self._end(part)
        elif part.reads_disk and not part.reading and part.landed < self._slab.num_layers:
            with self._changed:
                self._changed.notify_all()  # there is room for another layer

    def leave_to_threads(self) -> None:
        """No step waits for loads any more: what steps have not placed by themselves, the thread will."""
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

    def read(self) -> None:
        """Layers off the disk until `close`."""
        while (part := self._next_to_read()) is not None:
            started = time.perf_counter()
            failed, first, come, reason = {}, part.landed, 0, ""
            try:
                source = self._opened(part)
                if source is not None:
                    come = source.read(first, part.reading, partial(self._landed, part))
            except BlockMissing as error:
                failed, reason = {block.key: error.reason for block in part.blocks}, error.reason
            with self._changed:
                progress = self._progress(part)
                if progress is not None and reason in {"deadline", "io"}:
                    self._tell_late(part, progress)
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

    def _opened(self, part: _Part) -> ExtentSource | None:
        """Where a part's bytes come from. None for one that has ended, whose slots are others'."""
        with self._changed:
            if part.source is None and not part.load.failed:
                assert self._disk is not None
                part.source = ExtentSource(part.blocks, self._slab, self._disk, self._landings)
            assert not isinstance(part.source, SlotSource)
            return part.source

    def _landed(self, part: _Part, count: int) -> int:
        """Layers have come off the disk. How many are to come next: as many as are there already, for every call takes
        processor time from the step that computes meanwhile, and while there is something to place, nobody waits for
        the first of them. None if another load is more urgent."""
        with self._changed:
            part.landed += count
            part.landed_s = part.reading_s + time.perf_counter() - part.asked_s
            if self._step_waits or not part.in_step:
                self._changed.notify_all()
            if part.load.failed or (
                not self._may_come(part)
                and any(self._may_come(other) and self._may_be_read(other) for other in self._parts)
            ):
                return 0
            return max(1, part.landed - part.placed)

    def place(self, rotations: KeyRotations) -> None:
        """Layers that no step places by itself, until `close`."""
        while (part := self._next_to_place()) is not None:
            if not part.reads_disk and not part.load.failed:
                started = time.perf_counter()
                size = len(part.blocks) * self._slab.segment_bytes[part.placed]
                self._throttle.wait(self._throttle.book(size))
                part.reading_s += time.perf_counter() - started
            self._place(part, rotations, together=False)
            if self._is_over(part):
                self._end(part)

    def _next_to_read(self) -> _Part | None:
        with self._changed:
            part = self._next(self._may_be_read)
            if part is not None:
                part.reading, part.asked_s = self._may_land(part), time.perf_counter()
            return part

    def _may_be_read(self, part: _Part) -> bool:
        return part.reads_disk and not part.reading and not part.load.failed and self._may_land(part) > 0

    def _may_land(self, part: _Part) -> int:
        """How many more layers of a part may come off the disk now."""
        stop = min(self._slab.num_layers, part.placed + part.ahead)  # what `ExtentSource` has room for
        if not self._may_come(part):
            stop = min(stop, self._read_buffer_layers)
        return stop - part.landed

    def _next_to_place(self) -> _Part | None:
        with self._changed:
            return self._next(
                lambda part: (
                    not part.in_step
                    and self._has_come(part)
                    and (self._may_come(part) or part.placed < self._read_buffer_layers)
                )
            )

    def _may_come(self, part: _Part) -> bool:
        """Whether the read buffer does not matter any more."""
        return part.load.started or bool(part.load.failed) or self._closing

    def _next(self, is_wanted: Callable[[_Part], bool]) -> _Part | None:
        """Waits for a part whose next layer may come; one whose request runs goes first. None at the end."""
        while self._parts or not self._closing:
            wanted = [part for part in self._parts if is_wanted(part)]
            if wanted:
                return next((part for part in wanted if self._may_come(part)), wanted[0])
            self._changed.wait(1.0)
        return None

    def _place(self, part: _Part, rotations: KeyRotations, *, together: bool) -> None:
        """The next layer, unless the load has failed."""
        if part.load.failed:
            return
        started = time.perf_counter()
        # Notes of its own: the other part may be noting as well.
        failed: dict[BlockKey, str] = {}
        source, loader = self._begun(part, failed)
        layer = part.placed
        if not failed:
            loader.place(layer, failed, rotations, together=together)
            self._synchronise()
            if isinstance(source, ExtentSource) and not failed:
                source.keep(layer)
            elif isinstance(source, ExtentSource):
                source.tell_damage(failed, layer)
        part.placing_s += time.perf_counter() - started
        with self._changed:
            if failed:
                part.load.failed.update(failed)
                return
            part.placed += 1
            # The last one counts when the event is out: whoever waits for it may then believe the event.
            part.layers = min(part.placed, self._slab.num_layers - 1)
            if not together:
                self._changed.notify_all()

    def _begun(self, part: _Part, failed: dict[BlockKey, str]) -> tuple[SlotSource | ExtentSource, Loader]:
        if part.source is None:
            part.source = SlotSource(part.blocks, self._slab)
            failed.update(dict.fromkeys(part.source.unsealed, "checksum"))
        if part.loader is None:
            part.loader = Loader(source=part.source, pool=self._pool)
        return part.source, part.loader

    def _end(self, part: _Part) -> None:
        """A part has ended, in whatever way; with the last one, tell that the load has."""
        failed = part.load.failed
        if part.placed == self._slab.num_layers:
            part.load.whole.update(block.key for block in part.blocks)
        with self._changed:
            part.has_ended = True
            is_read = part.reading > 0
        if isinstance(part.source, ExtentSource) and not is_read:
            if not failed:
                part.source.seal()
            part.source.close()
        if not failed:
            direction = "disk_to_hbm" if part.reads_disk else "dram_to_hbm"
            size = len(part.blocks) * self._slab.slot_bytes
            # One layer is read while another is placed: all but one layer of the shorter is hidden by the longer.
            shorter, longer = sorted((part.reading_s, part.placing_s))
            hidden = 1 - 1 / self._slab.num_layers if part.reads_disk else 0
            self._completions.tell(Transferred(direction, size, longer + shorter * (1 - hidden)))
        with self._changed:
            self._parts.remove(part)
            part.load.left -= 1
            if not part.load.left:
                whole = frozenset(part.load.whole if failed else ())
                self._completions.tell(Loaded(part.load.job_id, failed, whole))
            part.layers = self._slab.num_layers
            if not part.in_step:
                self._changed.notify_all()

    def _synchronise(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
