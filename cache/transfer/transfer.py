"""Carries out the cache's moves: the only place, with `tiers/` and `codec`, that touches bytes.

Beside the engine's there is a thread for each stream, in a file of its own in `tiers/`: saving into DRAM slots, loading
into HBM layer by layer, fetching from disk, writing to it. What somebody waits for never stands behind what nobody
waits for. Torch and the kernel let go of the GIL while they copy. What has ended is told by events, in the engine's own
thread. On CUDA the copies run on streams of their own over pinned memory and the threads wait for them; nothing is told
before the bytes are there.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from cache.moves import (
    AbandonLoad,
    CapturePiece,
    CopyRows,
    DeleteExtents,
    Event,
    FetchBlocks,
    FillFromPage,
    FillFromSlot,
    LoadBlocks,
    Loaded,
    Move,
    PutSession,
    ReleaseLoad,
    Save,
    SealSlot,
    WriteExtent,
)
from cache.rates import LoadProgress
from cache.storage.extent_store import ExtentStore
from cache.storage.slab import Slab
from cache.storage.thread_priority import SAVING, WRITING, lower_priority
from cache.storage.throttle import Throttle
from cache.transfer.capture import Captured, SavedRows
from cache.transfer.events import Events
from cache.transfer.fetch_stream import FetchStream
from cache.transfer.key_rotations import KeyRotations
from cache.transfer.load_stream import LoadStream
from cache.transfer.save_stream import SaveStream
from cache.transfer.write_stream import WriteStream
from kernels.attention.ragged_batch import KvPages
from kernels.kv_copy import gather_rows, write_rows

log = logging.getLogger(__name__)


class Transfer:
    """Owned by the engine's thread: public methods are called there. Threads end with the process, or by `close`."""

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        slab: Slab,
        disk: ExtentStore | None,
        rotations: Callable[[], KeyRotations],
        read_buffer_layers: int,
        dram_throttle: Throttle,
        save_throttle: Throttle,
        synchronous: bool,
        max_backlog_bytes: int,
    ) -> None:
        """dram_throttle: out of DRAM; save_throttle: into it."""
        self._pages = pages
        self._slab = slab
        self._disk = disk
        self._device = pages[0].k.device
        self._inline = rotations()
        self._completions = Events()
        self._saves = SaveStream(
            pages=pages,
            slab=slab,
            throttle=save_throttle,
            synchronous=synchronous,
            max_backlog_bytes=max_backlog_bytes,
            rotations=self._inline,
            completions=self._completions,
        )
        self._loads = LoadStream(
            pages=pages,
            slab=slab,
            disk=disk,
            rotations=self._inline,
            read_buffer_layers=read_buffer_layers,
            throttle=dram_throttle,
            completions=self._completions,
        )
        # By name: what the thread does, and how far behind the engine's it stands for a processor.
        work: dict[str, tuple[Callable[[], None], int]] = {
            "kv-save": (lambda: self._saves.run(rotations()), SAVING),
            "kv-load": (lambda: self._loads.place(rotations()), 0),
        }
        if disk is not None:
            self._fetches = FetchStream(slab=slab, disk=disk, completions=self._completions)
            self._writes = WriteStream(slab=slab, disk=disk, completions=self._completions)
            work["kv-load-disk"] = (self._loads.read, 0)
            work |= {"kv-fetch": (self._fetches.run, 0), "kv-write": (self._writes.run, WRITING)}
        self._threads = [
            threading.Thread(target=self._run, args=(name, *how), name=name, daemon=True) for name, how in work.items()
        ]
        if slab.num_slots:
            self._start_threads()

    def _start_threads(self) -> None:
        # Settles this thread's number: what the threads below set for themselves is also the default of all that have
        # none yet. Setting it here again would make it theirs.
        torch.get_num_threads()
        for thread in self._threads:
            thread.start()

    def carry_out(self, moves: Sequence[Move], running: Container[str] = ()) -> None:
        """Copies inside HBM at once, in order, on the current stream; everything else is handed to its thread. Loads of
        requests that are `running`, in the step that follows, may be left to `wait_layer` until the next `poll`."""
        saves: list[Save] = []
        for move in moves:
            match move:
                case CopyRows():
                    self._copy(move)
                case LoadBlocks():
                    self._loads.put(move, in_step=move.request_id in running)
                case ReleaseLoad():
                    self._loads.start(move.job_id)
                case AbandonLoad():
                    self._loads.abandon(move.job_id)
                case FillFromPage() | FillFromSlot() | SealSlot():
                    saves.append(move)
                case FetchBlocks():
                    self._fetches.put(move)
                case WriteExtent() | DeleteExtents() | PutSession():
                    self._writes.put(move)
        self._saves.put(saves)

    def save(self, step: Captured | None, pieces: list[CapturePiece]) -> None:
        """See SaveStream."""
        self._saves.save(step, pieces)

    @property
    def placed_bytes(self) -> int:
        """KV that layers have saved by themselves: HBM to DRAM, and no event tells of it."""
        return self._saves.placed_bytes

    def places(self, pieces: list[CapturePiece], num_rows: int) -> SavedRows | None:
        """See SaveStream."""
        return self._saves.places(pieces, num_rows)

    def start(self, job_id: int) -> None:
        """The request of a load runs now, or waits for it no longer: what is behind the read buffer may come."""
        self._loads.start(job_id)

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Whether layer `layer` of a load has arrived, or has failed to, within that time; see LoadStream."""
        return self._loads.wait_layer(job_id, layer, timeout_s)

    def layers_arrived(self, job_id: int) -> int:
        """Of a load; all of them when it has ended."""
        return self._loads.layers_arrived(job_id)

    def progress(self, job_id: int) -> LoadProgress | None:
        """See LoadStream."""
        return self._loads.progress(job_id)

    @property
    def waited_s(self) -> float:
        """Seconds that steps have waited for loads."""
        return self._loads.waited_s

    def poll(self) -> list[Event]:
        """What has ended since the last call. Raises what broke a thread, if one broke."""
        self._saves.flush_due()
        self._loads.leave_to_threads()
        events = self._completions.take()
        for event in events:
            if isinstance(event, Loaded):
                self._loads.forget(event.job_id)
        return events

    def wait(self, timeout_s: float) -> None:
        """Returns when something has ended, or after the timeout."""
        self._completions.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let the threads finish what they were given. False if that took too long."""
        end = time.monotonic() + timeout_s
        self._saves.close()
        self._loads.close()
        if self._disk is not None:
            self._fetches.close()
            self._writes.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        if self._disk is not None:
            self._disk.close()
        return not any(thread.is_alive() for thread in self._threads)

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

    def _run(self, name: str, work: Callable[[], None], lower_by: int) -> None:
        lower_priority(lower_by)
        try:
            # Their copies are small. With a second team of worker threads there would be more than cores, and OpenMP
            # would put the engine's to sleep between any two products: 13.5 ms a decode step instead of 9.
            torch.set_num_threads(1)
            with torch.inference_mode(), self._stream():
                work()
        except BaseException as error:
            log.exception("%s has ended", name)
            self._completions.fail(error)

    def _stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
