"""Carries out the cache's moves: the only place, with `tiers/` and `codec`, that touches bytes.

Three threads beside the engine's: one saves into DRAM slots, one loads into HBM layer by layer, one works for the disk.
Each takes its orders in turn, and torch and the kernel let go of the GIL while they copy. What has ended is told by
events, in the engine's own thread. On CUDA the copies run on streams of their own over pinned memory and the threads
wait for them; nothing is told before the bytes are there.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from cache.block import BLOCK_TOKENS, BlockKey
from cache.plan import (
    BlockLoad,
    CapturePiece,
    CopyRows,
    Deleted,
    DeleteExtents,
    Event,
    FetchBlocks,
    Fetched,
    FillFromPage,
    FillFromSlot,
    LoadBlocks,
    Loaded,
    Move,
    PutSession,
    ReleaseLoad,
    Save,
    Saved,
    SealSlot,
    Transferred,
    WriteExtent,
    Written,
)
from cache.tiers.base import BlockMissing, TierFailed, TierFull
from cache.tiers.capture import Captured, CapturedRows
from cache.tiers.disk import DiskTier
from cache.tiers.dram import Slab
from cache.tiers.layer_source import LayerSource
from cache.tiers.throttle import Throttle
from kernels.attention.base import KvPages
from kernels.kv_copy import gather_rows, write_rows

log = logging.getLogger(__name__)

_HELD_STEPS = 32  # decode steps that are saved together, unless a block is full before
_FEW_ROWS = 64


class Rotations(Protocol):
    """Keys in and out of position; `engine.rotations.Rotations`. One per thread."""

    def rotate(self, layer: int, k_plain: Tensor, positions: Tensor) -> Tensor: ...
    def unrotate(self, layer: int, k: Tensor, positions: Tensor) -> Tensor: ...


@dataclass(slots=True)
class _Job:
    """A load: how many leading layers have arrived."""

    move: LoadBlocks
    started: bool  # its request runs, or has given its pages back: layers beyond the read buffer may come
    layers: int = 0
    failed: dict[BlockKey, str] = field(default_factory=dict)
    steps: Iterator[None] | None = None  # each brings a layer


class Transfer:
    """Owned by the engine's thread: public methods are called there. Threads end with the process, or by `close`."""

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        slab: Slab,
        disk: DiskTier | None,
        rotations: Callable[[], Rotations],
        read_buffer_layers: int,
        dram_throttle: Throttle,
        save_throttle: Throttle,
        synchronous: bool,
        max_backlog_bytes: int,
    ) -> None:
        self._pages = pages
        self._slab = slab
        self._disk = disk
        self._device = pages[0].k.device
        self._read_buffer_layers = slab.num_layers if read_buffer_layers < 0 else read_buffer_layers
        self._dram_throttle = dram_throttle  # out of DRAM
        self._save_throttle = save_throttle  # into it
        self._synchronous = synchronous
        self._max_backlog_bytes = max_backlog_bytes
        self._backlog_bytes = 0
        self._inline = rotations()
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._waited_s = 0.0
        self._failure: BaseException | None = None
        self._saves: SimpleQueue[Save | list[CapturedRows] | None] = SimpleQueue()
        self._held: list[CapturedRows] = []
        self._loads: list[_Job] = []  # those not at their end, in the order they were given
        self._closing = False
        self._io: SimpleQueue[WriteExtent | FetchBlocks | DeleteExtents | PutSession | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
            for name, work in (
                ("kv-save", lambda: self._save_all(rotations())),
                ("kv-load", lambda: self._load_all(rotations())),
                ("kv-disk", self._io_all),
            )
        ]
        if slab.num_slots:
            self._start_threads()

    def _start_threads(self) -> None:
        # Settles this thread's number: what the threads below set for themselves is also the default of all that have
        # none yet. Setting it here again would make it theirs.
        torch.get_num_threads()
        for thread in self._threads:
            thread.start()

    # --- the engine's side --------------------------------------------------------------------------------------------

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Copies inside HBM at once, in order, on the current stream; everything else is handed to its thread."""
        for move in moves:
            match move:
                case CopyRows():
                    self._copy(move)
                case LoadBlocks():
                    job = self._jobs[move.job_id] = _Job(
                        move, started=self._read_buffer_layers >= self._slab.num_layers
                    )
                    with self._changed:
                        self._loads.append(job)
                        self._changed.notify_all()
                case ReleaseLoad():
                    self.start(move.job_id)
                case FillFromPage() | FillFromSlot() | SealSlot():
                    self._flush()
                    self._saves.put(move)
                case _:
                    self._io.put(move)

    def save(self, step: Captured, pieces: list[CapturePiece]) -> None:
        """Save these parts of a step. Waits when too much is waiting already, or always if saving is synchronous."""
        if not pieces:
            return
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._held.append(CapturedRows(step, pieces, ready))
        # A decode step is a few rows: copying them costs its calls, so the rows of many steps go together.
        if self._synchronous or len(self._held) >= _HELD_STEPS or step.keys[0].shape[0] > _FEW_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Hand over the steps that were held back. Anything that tells about a slot has to come behind them."""
        if not self._held:
            return
        held, self._held = self._held, []
        size = self._bytes_of(held)
        with self._changed:
            self._backlog_bytes += size
            self._saves.put(held)
            limit = 0 if self._synchronous else self._max_backlog_bytes
            while self._backlog_bytes > limit:
                self._check()
                self._changed.wait(1.0)

    def _bytes_of(self, captures: Sequence[CapturedRows]) -> int:
        """The KV of all of their rows, saved or not: they are kept alive together."""
        rows = sum(capture.step.keys[0].shape[0] for capture in captures)
        return rows * self._slab.slot_bytes // BLOCK_TOKENS

    def start(self, job_id: int) -> None:
        """The request of a load runs now, or waits for it no longer: what is behind the read buffer may come."""
        job = self._jobs.get(job_id)
        if job is not None and not job.started:
            with self._changed:
                job.started = True
                self._changed.notify_all()

    def wait_layer(self, job_id: int, layer: int) -> None:
        """Returns when layer `layer` of a load has arrived, or has failed to; the wait is bounded by the tiers' own
        deadlines."""
        job = self._jobs.get(job_id)
        if job is None or job.layers > layer:
            return
        started = time.monotonic()
        with self._changed:
            while job.layers <= layer:
                self._check()
                self._changed.wait(1.0)
        self._waited_s += time.monotonic() - started

    def layers_arrived(self, job_id: int) -> int:
        """Of a load; all of them when it has ended."""
        job = self._jobs.get(job_id)
        return self._slab.num_layers if job is None else job.layers

    @property
    def waited_s(self) -> float:
        """Seconds that steps have waited for loads."""
        return self._waited_s

    def poll(self) -> list[Event]:
        """What has ended since the last call. Raises what broke a thread, if one broke."""
        self._check()
        events = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Loaded):
                del self._jobs[event.job_id]
            events.append(event)
        return events

    def wait(self, timeout_s: float) -> None:
        """Returns when something has ended, or after the timeout."""
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let the threads finish what they were given. False if that took too long."""
        self._flush()
        end = time.monotonic() + timeout_s
        self._saves.put(None)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._io.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        if self._disk is not None:
            self._disk.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a transfer thread has ended") from self._failure

    def _copy(self, move: CopyRows) -> None:
        page_size = self._pages[0].k.shape[1]
        rows = torch.arange(move.num_rows, device=self._device)
        source = rows + (move.source_page * page_size + move.source_row)
        target = rows + (move.target_page * page_size + move.target_row)
        turned = move.source_position != move.target_position
        before, after = rows + move.source_position, rows + move.target_position
        keys = [gather_rows(layer.k, source) for layer in self._pages]
        if turned:
            keys = [self._inline.unrotate(layer, k, before) for layer, k in enumerate(keys)]
            keys = [self._inline.rotate(layer, k, after) for layer, k in enumerate(keys)]
        for layer, k in zip(self._pages, keys, strict=True):
            write_rows(layer.k, target, k)
            write_rows(layer.v, target, gather_rows(layer.v, source))

    # --- the threads --------------------------------------------------------------------------------------------------

    def _run(self, name: str, work: Callable[[], None]) -> None:
        try:
            # Their copies are small. With a second team of worker threads there would be more than cores, and OpenMP
            # would put the engine's to sleep between any two products: 13.5 ms a decode step instead of 9.
            torch.set_num_threads(1)
            with torch.inference_mode(), self._stream():
                work()
        except BaseException as error:
            log.exception("%s has ended", name)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _tell(self, *events: Event) -> None:
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()

    # Saving: HBM -> DRAM.

    def _save_all(self, rotations: Rotations) -> None:
        while (order := self._saves.get()) is not None:
            started = time.perf_counter()
            match order:
                case list():
                    size = self._save_captures(order)
                    self._tell(Transferred("hbm_to_dram", size, time.perf_counter() - started))
                case FillFromSlot():
                    for layer in range(self._slab.num_layers):
                        for rows in (self._slab.k(layer), self._slab.v(layer)):
                            rows[order.slot, : order.num_rows] = rows[order.source_slot, : order.num_rows]
                case FillFromPage():
                    self._fill_from_page(order, rotations)
                case SealSlot():
                    if order.num_rows:
                        self._slab.clear_behind(order.slot, order.num_rows)
                        self._slab.seal(order.slot)
                    self._tell(Saved(order.ticket))

    def _save_captures(self, captures: list[CapturedRows]) -> int:
        """Rows of some steps into their slots. Returns the bytes."""
        held = self._bytes_of(captures)
        pieces = [piece for capture in captures for piece in capture.pieces]
        slots = torch.cat([torch.full((p.num_rows,), p.slot) for p in pieces])
        places = torch.cat([torch.arange(p.slot_row, p.slot_row + p.num_rows) for p in pieces])
        wanted = [self._wanted_rows(capture) for capture in captures]
        size = 0
        passed = self._save_throttle.book(sum(p.num_rows for p in pieces) * self._slab.slot_bytes // BLOCK_TOKENS)
        for layer in range(self._slab.num_layers):
            for target, parts in (
                (self._slab.k(layer), [capture.step.keys[layer] for capture in captures]),
                (self._slab.v(layer), [capture.step.values[layer] for capture in captures]),
            ):
                chosen = [t if rows is None else t.index_select(0, rows) for t, rows in zip(parts, wanted, strict=True)]
                source = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
                source = source.to(target.device)
                as_words(target).index_put_((slots, places), as_words(source))
                size += source.numel() * source.element_size()
        self._save_throttle.wait(passed)
        captures.clear()
        with self._changed:
            self._backlog_bytes -= held
            self._changed.notify_all()
        return size

    def _wanted_rows(self, capture: CapturedRows) -> Tensor | None:
        """Indices of the rows of a step that are to be saved; None for all of them."""
        if capture.ready is not None:
            capture.ready.synchronize()
        rows = torch.cat([torch.arange(p.batch_row, p.batch_row + p.num_rows) for p in capture.pieces])
        return None if len(rows) == capture.step.keys[0].shape[0] else rows.to(self._device)

    def _fill_from_page(self, order: FillFromPage, rotations: Rotations) -> None:
        page_size = self._pages[0].k.shape[1]
        rows = torch.arange(order.num_rows, device=self._device)
        slots = rows + (order.page * page_size + order.page_row)
        positions = rows + order.position
        span = slice(order.slot_row, order.slot_row + order.num_rows)
        for layer, pages in enumerate(self._pages):
            self._slab.k(layer)[order.slot, span] = rotations.unrotate(layer, gather_rows(pages.k, slots), positions)
            self._slab.v(layer)[order.slot, span] = gather_rows(pages.v, slots)

    # Loading: DRAM or disk -> HBM.

    def _load_all(self, rotations: Rotations) -> None:
        while (job := self._next_load()) is not None:
            if job.steps is None:
                job.steps = self._load(job, rotations)
            try:
                next(job.steps)
                continue
            except StopIteration:
                pass
            except BlockMissing as error:
                for block in job.move.blocks:
                    if block.extent is not None:
                        job.failed.setdefault(block.key, error.reason)
            self._tell(Loaded(job.move.job_id, job.failed))
            with self._changed:
                self._loads.remove(job)
                job.layers = self._slab.num_layers
                self._changed.notify_all()

    def _next_load(self) -> _Job | None:
        """Waits for a load that may bring its next layer: one that runs, else one whose read buffer has room. None at
        the end."""
        with self._changed:
            while not (self._closing and not self._loads):
                for job in self._loads:
                    if job.started or self._closing:
                        return job
                for job in self._loads:
                    if job.layers < self._read_buffer_layers:
                        return job
                self._changed.wait(1.0)
        return None

    def _load(self, job: _Job, rotations: Rotations) -> Iterator[None]:
        """Brings a layer whenever it is asked to go on. Raises BlockMissing."""
        blocks = job.move.blocks
        page_size = self._pages[0].k.shape[1]
        row_numbers = [torch.arange(b.num_rows) for b in blocks]
        slots = torch.cat([r + (b.page * page_size + b.page_row) for r, b in zip(row_numbers, blocks, strict=True)])
        positions = torch.cat([r + b.position for r, b in zip(row_numbers, blocks, strict=True)])
        slots, positions = slots.to(self._device), positions.to(self._device)
        seconds = {"dram_to_hbm": 0.0, "disk_to_hbm": 0.0}
        source = LayerSource(blocks, self._slab, self._disk)
        with source:
            for layer in range(self._slab.num_layers):
                started = time.perf_counter()
                passed = self._dram_throttle.book(source.dram_bytes(layer))
                k, v = source.read(layer, job.failed)
                self._dram_throttle.wait(passed)
                read = time.perf_counter()
                if job.failed:
                    return
                k, v = k.to(self._device, non_blocking=True), v.to(self._device, non_blocking=True)
                write_rows(self._pages[layer].k, slots, rotations.rotate(layer, k, positions))
                write_rows(self._pages[layer].v, slots, v)
                self._synchronise()
                ended = time.perf_counter()
                with self._changed:
                    # The last one counts when the event is out: whoever waits for it may then believe the event.
                    job.layers = min(layer + 1, self._slab.num_layers - 1)
                    self._changed.notify_all()
                share = source.disk_share
                seconds["disk_to_hbm"] += (read - started) * (1 if share else 0) + (ended - read) * share
                seconds["dram_to_hbm"] += (read - started) * (0 if share else 1) + (ended - read) * (1 - share)
                yield
            source.seal_passed()
        for direction, size in source.total_bytes().items():
            self._tell(Transferred(direction, size, seconds[direction]))

    # The disk.

    def _io_all(self) -> None:
        while (order := self._io.get()) is not None:
            assert self._disk is not None
            match order:
                case WriteExtent():
                    self._write(order, self._disk)
                case FetchBlocks():
                    self._fetch(order, self._disk)
                case DeleteExtents():
                    self._delete(order, self._disk)
                case PutSession():
                    try:
                        self._disk.put_session(order.record)
                    except TierFailed as error:
                        log.warning("a session was not recorded: %s", error)

    def _write(self, order: WriteExtent, disk: DiskTier) -> None:
        started = time.perf_counter()
        try:
            extent = disk.write(
                order.session, order.blocks, lambda layer, block: self._slab.segment(layer, order.slots[block])
            )
        except (TierFull, TierFailed) as error:
            log.warning("%d blocks were not written to disk: %s", len(order.blocks), error)
            self._tell(Written(order.job_id, None, str(error)))
            return
        seconds = time.perf_counter() - started
        self._tell(Transferred("dram_to_disk", extent.size_bytes, seconds), Written(order.job_id, extent, None))

    def _delete(self, order: DeleteExtents, disk: DiskTier) -> None:
        problem = None
        try:
            for extent_id in order.extent_ids:
                disk.delete(extent_id)
            if order.session is not None:
                disk.delete_session(*order.session)
        except TierFailed as error:
            log.warning("%d extents were not deleted: %s", len(order.extent_ids), error)
            problem = str(error)
        self._tell(Deleted(order.job_id, problem))

    def _fetch(self, order: FetchBlocks, disk: DiskTier) -> None:
        started = time.perf_counter()
        failed: dict[BlockKey, str] = {}
        loads = [BlockLoad(key, 1, slot, extent, 0, 0, 0) for key, extent, slot in order.blocks]
        source = LayerSource(loads, self._slab, disk)
        try:
            with source:
                for layer in range(self._slab.num_layers):
                    source.read_disk(layer)
                source.seal_passed()
        except BlockMissing as error:
            failed = {key: error.reason for key, _, _ in order.blocks}
        size = len(order.blocks) * self._slab.slot_bytes
        if not failed:
            self._tell(Transferred("disk_to_dram", size, time.perf_counter() - started))
        self._tell(Fetched(order.job_id, failed))


def as_words(rows: Tensor) -> Tensor:
    """The same memory in elements of eight bytes if that can be: copying by index costs its time per element."""
    per_word = 8 // rows.element_size()
    strides = (*rows.stride()[:-1], rows.storage_offset())
    if rows.stride(-1) != 1 or rows.shape[-1] % per_word or any(stride % per_word for stride in strides):
        return rows
    return rows.view(torch.int64)
