"""Carries out the cache's moves. In cache/, only this folder and `storage/` touch bytes.

The engine's thread orders the moves. Each stream has a file here and a thread: `save_stream` saves into DRAM slots,
`load_stream` loads into HBM layer by layer (other threads read disk and Redis for it), `fetch_stream` fetches from disk
into DRAM, `encode_stream` compresses blocks in DRAM where there is a codec, and `write_stream` writes to disk. So a
load, for which a request waits, never waits for a fetch or a write. The streams to and from Redis are in
`cache/transfer/redis/`.

Torch and the kernels release the GIL while they copy. The threads report what has ended by events, which the engine's
thread takes with `poll`. On CUDA the copies run on streams of their own over pinned memory, and a thread reports a copy
only when the bytes are there.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from functools import partial

import torch

from reprise.cache.moves import (
    AbandonLoad,
    BlockLoad,
    CapturePiece,
    CopyRows,
    DeleteExtents,
    DiskGivenUp,
    DiskTaken,
    EncodeBlocks,
    Event,
    FetchBlocks,
    FillFromPage,
    FillFromSlot,
    FinishLoad,
    LoadBlocks,
    Loaded,
    Move,
    PutSession,
    Save,
    SealSlot,
    WriteExtent,
)
from reprise.cache.rates import LoadProgress
from reprise.cache.storage.extent_store import ExtentStore, Kept
from reprise.cache.storage.thread_priority import SAVING, WRITING, lower_priority
from reprise.cache.transfer.capture import Captured, SavedRows
from reprise.cache.transfer.device_streams import DeviceStream, DeviceStreams, streams_of
from reprise.cache.transfer.encode_stream import EncodeStream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.fetch_stream import DiskFetches
from reprise.cache.transfer.key_rotations import KeyRotations
from reprise.cache.transfer.load_stream import LoadStream
from reprise.cache.transfer.save_stream import SaveStream
from reprise.cache.transfer.slot_reader import SlotReader
from reprise.cache.transfer.stores import Links, Stores, Work
from reprise.cache.transfer.write_stream import WriteStream
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.kv_copy import gather_rows, write_rows

log = logging.getLogger(__name__)


class Transfer:
    """The streams that move KV, and their threads, which end with the process or by `close`. Every public method is
    called by the engine's thread."""

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        stores: Stores,
        links: Links,
        rotations: Callable[[], KeyRotations],
        read_buffer_layers: int,
        synchronous: bool,
        max_backlog_bytes: int,
        streams: DeviceStreams | None = None,
    ) -> None:
        """Set up. links: caps between HBM and DRAM. rotations: makes the rotator of keys for one thread.
        read_buffer_layers: how many layers may be loaded before the request runs; negative: all. synchronous,
        max_backlog_bytes: as for `SaveStream`. streams: the device's streams; None: those of the pages' device."""
        slab, coded, disk = stores.slab, stores.coded, stores.disk
        self._pages = pages
        self._slab = slab
        self._disk = disk
        self._device = pages[0].k.device
        self._streams = streams_of(self._device) if streams is None else streams
        self.compute = self._streams.compute
        """The stream on which steps are computed. Work that is launched here is done after what was launched on it
        before."""
        self._inline = rotations()
        self._completions = Events()
        self._remote = None if stores.remote is None else stores.remote(stores, self._completions)
        self._saves = SaveStream(
            pages=pages,
            slab=slab,
            throttle=links.save,
            synchronous=synchronous,
            max_backlog_bytes=max_backlog_bytes,
            rotations=self._inline,
            compute=self.compute,
            completions=self._completions,
        )
        self._loads = LoadStream(
            pages=pages,
            stores=stores,
            remote=self._remote,
            rotations=self._inline,
            read_buffer_layers=read_buffer_layers,
            throttle=links.load,
            compute=self.compute,
            completions=self._completions,
        )
        work: Work = {
            "kv-save": (self._on_stream(lambda stream: self._saves.run(rotations(), stream)), SAVING),
            "kv-load": (self._on_stream(lambda stream: self._loads.place(rotations(), stream)), 0),
        }
        self._encodes: EncodeStream | None = None
        if coded is not None and coded.num_slots:
            self._encodes = EncodeStream(slab=slab, coded=coded, completions=self._completions)
            work["kv-encode"] = (self._encodes.run, WRITING)
        if disk is not None:
            self._fetches = DiskFetches(slab=slab, disk=disk, coded=coded, completions=self._completions)
            self._writes = WriteStream(slab=slab, disk=disk, coded=coded, completions=self._completions)
            work["kv-load-disk"] = (self._loads.readers["disk"].run, 0)
            work |= {"kv-fetch": (self._fetches.run, 0), "kv-write": (self._writes.run, WRITING)}
        if self._remote is not None:
            work |= {"kv-load-redis": (self._loads.readers["redis"].run, 0), **self._remote.work}
        self._threads = [
            threading.Thread(target=self._run, args=(name, *how), name=name, daemon=True) for name, how in work.items()
        ]
        if slab.num_slots:
            self._start_threads()
        if disk is not None:
            disk.listen(partial(self._tell_of_disk, disk))

    def _tell_of_disk(self, disk: ExtentStore, problem: str | None, found: Kept | None) -> None:
        if problem is not None:
            self._completions.tell(DiskGivenUp(problem))
        else:
            extents, records = (None, ()) if found is None else found
            self._completions.tell(DiskTaken(disk.capacity_bytes, extents, records))

    def _start_threads(self) -> None:
        # Fix this thread's number of threads by reading it: the number that the threads below set for themselves
        # becomes the default of every thread that has none yet. Setting it here instead would change theirs.
        torch.get_num_threads()
        for thread in self._threads:
            thread.start()

    def carry_out(self, moves: Sequence[Move], running: Container[str] = ()) -> None:
        """Make the copies inside HBM at once, in order, on the current stream, and pass every other move to its stream.
        running: requests of the step that follows; until the next `poll`, `wait_layer` may place their loads itself."""
        saves: list[Save] = []
        for move in moves:
            match move:
                case CopyRows():
                    self.compute.launch(partial(self._copy, move))
                case LoadBlocks():
                    self._loads.put(move, in_step=move.request_id in running)
                case FinishLoad():
                    self._loads.start(move.job_id)
                case AbandonLoad():
                    self._loads.abandon(move.job_id)
                case FillFromPage() | FillFromSlot() | SealSlot():
                    saves.append(move)
                case EncodeBlocks():
                    assert self._encodes is not None
                    self._encodes.put(move)
                case FetchBlocks():
                    self._fetches.put(move)
                case WriteExtent() | DeleteExtents() | PutSession():
                    self._writes.put(move)
                case _:
                    assert self._remote is not None
                    self._remote.put(move)
        self._saves.put(saves)

    def save(self, step: Captured | None, pieces: list[CapturePiece]) -> None:
        """Save rows of a step to DRAM, except rows that its layers have saved themselves. step: the KV that was
        captured; None: there is none. pieces: which rows of the batch go to which slots. Waits if too many steps are
        still to be saved."""
        self._saves.save(step, pieces)

    @property
    def placed_bytes(self) -> int:
        """The bytes that the kernels of layers have saved from HBM to DRAM themselves; no event reports these."""
        return self._saves.placed_bytes

    def places(self, pieces: list[CapturePiece], num_rows: int) -> SavedRows | None:
        """Return where the kernels of a step are to save its rows in DRAM while they compute them; None: they cannot do
        so, and `save` has to do it. pieces: which rows of the batch go to which slots. num_rows: rows of the batch."""
        return self._saves.places(pieces, num_rows)

    def reader_of(self, blocks: Sequence[BlockLoad]) -> SlotReader:
        """Return a reader for parked blocks, which no load brings to HBM for good: whenever a step asks for it, the
        reader copies one layer of the blocks from their pinned DRAM slots to pages."""
        return self._loads.reader_of(blocks)

    def start(self, job_id: int) -> None:
        """Let a load go on past the first few layers, to which loads of waiting requests are limited, because its
        request runs now or does not wait for it any more."""
        self._loads.start(job_id)

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Wait until a layer of a load is in HBM or the load has failed and ended, for at most `timeout_s` seconds.
        Returns False if the time was over first."""
        return self._loads.wait_layer(job_id, layer, timeout_s)

    def layers_arrived(self, job_id: int) -> int:
        """Return how many layers of a load, counted from the first, are in HBM; all of them once the load has ended,
        even if it has failed. Returns 0 after `poll` has returned the load's end."""
        return self._loads.layers_arrived(job_id)

    def progress(self, job_id: int) -> LoadProgress | None:
        """Return the progress of a load's disk and Redis reads; None if it does not wait for them."""
        return self._loads.progress(job_id)

    @property
    def waited_s(self) -> float:
        """The seconds that steps have waited for loads since the start."""
        return self._loads.waited_s

    def poll(self) -> list[Event]:
        """Return the events that no earlier call has returned. Raises RuntimeError if a thread has failed."""
        if self._saves.is_due:
            self._saves.flush()
        if self._loads.parts:
            self._loads.leave_to_threads()
        events = self._completions.take() if self._completions.has_news else []
        for event in events:
            if isinstance(event, Loaded):
                self._loads.forget(event.job_id)
        return events

    @property
    def bell(self) -> int:
        """A file descriptor that becomes readable when `poll` has something to return."""
        return self._completions.bell

    def wait(self, timeout_s: float) -> None:
        """Wait until a move has ended, or until the timeout."""
        self._completions.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let the threads finish their queued work and end. Returns False if that took longer than `timeout_s`."""
        end = time.monotonic() + timeout_s
        self._saves.close()
        self._loads.close()
        if self._encodes is not None:
            self._encodes.close()
        if self._disk is not None:
            self._fetches.close()
            self._writes.close()
        if self._remote is not None:
            self._remote.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        if self._disk is not None:
            self._disk.close()
        if self._remote is not None:
            self._remote.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _copy(self, move: CopyRows) -> None:
        page_size = self._pages[0].k.shape[1]
        rows = torch.arange(move.num_rows, device=self._device)
        source = rows + (move.source_page * page_size + move.source_row)
        target = rows + (move.target_page * page_size + move.target_row)
        turned = move.source_position != move.target_position
        before, after = rows + move.source_position, rows + move.target_position
        if turned:
            keys = [layer.to_numbers(gather_rows(layer.k, source)) for layer in self._pages]
            keys = [self._inline.unrotate(layer, k, before) for layer, k in enumerate(keys)]
            keys = [self._inline.rotate(layer, k, after) for layer, k in enumerate(keys)]
            keys = [layer.to_rows(k) for layer, k in zip(self._pages, keys, strict=True)]
        else:
            keys = [gather_rows(layer.k, source) for layer in self._pages]
        for layer, k in zip(self._pages, keys, strict=True):
            write_rows(layer.k, target, k)
            write_rows(layer.v, target, gather_rows(layer.v, source))

    def _run(self, name: str, work: Callable[[], None], lower_by: int) -> None:
        lower_priority(lower_by)
        try:
            # These threads copy little at a time. A second team of worker threads would mean more threads than cores,
            # and OpenMP would put the engine's to sleep between two products: 13.5 ms a decode step instead of 9.
            torch.set_num_threads(1)
            with torch.inference_mode():
                work()
        except BaseException as error:
            log.exception("%s has ended", name)
            self._completions.fail(error)

    def _on_stream(self, work: Callable[[DeviceStream], None]) -> Callable[[], None]:
        """Return a function for a thread that makes a stream and calls `work` with it."""

        def run() -> None:
            with self._streams.own() as stream:
                work(stream)

        return run
