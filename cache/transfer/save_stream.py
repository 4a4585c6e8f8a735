"""Saves rows from HBM into DRAM slots while the engine computes (AttentionStore §3.2.2), on a thread of its own.

On CPU the processors themselves copy: a thread that saves takes one away from the step's team, which then waits for the
slowest of its members, and takes the GIL from the engine's loop. So on CPU in bf16 the kernels of a layer write the
rows that they have at hand to the slots themselves, and the engine's thread saves the rest between steps.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.moves import CapturePiece, FillFromPage, FillFromSlot, Save, Saved, SealSlot, Transferred
from reprise.cache.storage.slab import Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer.capture import Captured, CapturedRows, SavedRows
from reprise.cache.transfer.device_streams import DeviceStream, Fence
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.key_rotations import KeyRotations
from reprise.cache.transfer.row_saver import place_rows
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.kv_copy import gather_rows
from reprise.kernels.row_copies import compile_for, save_kernels
from reprise.kernels.views import as_bits

_HELD_STEPS = 32  # decode steps that are saved together, unless a block is full before
_FEW_ROWS = 64


class SaveStream:
    """A stream that saves rows for a Transfer. `run` is the work of a thread; the engine's thread calls the other
    methods and owns `rotations`."""

    def __init__(
        self,
        *,
        pages: Sequence[KvPages],
        slab: Slab,
        throttle: Throttle,
        synchronous: bool,
        max_backlog_bytes: int,
        rotations: KeyRotations,
        compute: DeviceStream,
        completions: Events,
    ) -> None:
        """Set up. synchronous: whether `save` waits until the rows are in DRAM. max_backlog_bytes: bytes of earlier
        steps' rows that may wait to be saved; with more, `save` waits. compute: the stream of the steps whose rows are
        saved."""
        self._pages, self._slab = pages, slab
        self._device = pages[0].k.device
        self._throttle = throttle
        self._synchronous = synchronous
        self._max_backlog_bytes = max_backlog_bytes
        self._backlog_bytes = 0
        self._rotations = rotations
        self._compute = compute
        self._completions = completions
        self._drained = threading.Condition()  # guards the backlog
        # The slots by layer, if kernels may write rows to them: no cap is set, and they can write this type. Nothing
        # goes to the thread then.
        self._blocks: list[np.ndarray] | None = None
        if self._device.type == "cpu" and slab.dtype == torch.bfloat16 and not throttle.is_capped:
            self._blocks = [as_bits(slab.segments(layer)) for layer in range(slab.num_layers)]
        spot = np.zeros((1, 2), np.int64)  # reused by steps of one row, each of which ends before the next begins
        self._one_row = SavedRows(self._blocks or (), spot)
        self._spot = memoryview(spot.reshape(-1).data)  # half the time of writing to an array
        self._orders: SimpleQueue[tuple[Sequence[Save], Fence] | list[CapturedRows] | None] = SimpleQueue()
        self._held: list[CapturedRows] = []
        self.is_due = False
        """Whether the steps that are held back have become too large to be held for long. If so, `flush` is to be
        called between steps, where the engine's thread saves by itself: within the step, its first token would wait for
        that."""
        self._row_bytes = slab.slot_bytes // BLOCK_TOKENS
        self.placed_bytes = 0  # saved by layers themselves, which no event reports
        # Compile the kernels that save before they are needed.
        if self._device.type == "cpu":
            save_kernels()
        elif self._device.type == "cuda" and slab.num_slots:
            compile_for(slab.parts(range(slab.num_layers)), self._device)

    def places(self, pieces: list[CapturePiece], num_rows: int) -> SavedRows | None:
        """Return where the kernels of a step are to save its rows in DRAM while they compute them; None: they cannot do
        so, and `save` has to do it. pieces: which rows of the batch go to which slots. num_rows: rows of the batch. The
        rows must not depend on a load under way. Call `save` after the step in both cases."""
        if self._blocks is None:
            return None
        if num_rows == 1 and pieces:  # most steps while one client is served, where microseconds count
            self.placed_bytes += self._row_bytes
            _, self._spot[0], self._spot[1], _ = pieces[0]
            return self._one_row
        if len(pieces) == num_rows:  # one row each, as in nearly every step: 2 us instead of 6
            self.placed_bytes += num_rows * self._row_bytes
            return SavedRows(self._blocks, np.array([(slot, slot_row) for _, slot, slot_row, _ in pieces]))
        spots = np.full((num_rows, 2), -1)
        if pieces:
            batch_rows, slots, slot_rows, counts = np.array(pieces).T
            num_saved = int(counts.sum())
            self.placed_bytes += num_saved * self._row_bytes
            # Pieces are in order, and as a rule without a gap: then no row has to be looked for.
            rows = np.arange(num_rows)
            if num_saved < num_rows:
                rows = np.concatenate([rows[first : first + count] for first, _, _, count in pieces])
            spots[rows, 0] = np.repeat(slots, counts)
            spots[rows, 1] = np.repeat(slot_rows - batch_rows, counts) + rows
        return SavedRows(self._blocks, spots)

    def save(self, step: Captured | None, pieces: list[CapturePiece]) -> None:
        """Save rows of a step to DRAM, except rows that its layers have saved themselves. step: the KV that was
        captured; None: there is none. pieces: which rows of the batch go to which slots. Waits if too many steps are
        still to be saved, and always if saving is synchronous."""
        if step is None or not pieces:
            return
        if step.num_layers < self._slab.num_layers:
            place_rows(self._slab, [CapturedRows(step, pieces, self._compute.fence())], step.layers)
            return
        self._held.append(CapturedRows(step, pieces, self._compute.fence()))
        # A decode step is a few rows: copying them costs its calls, so the rows of many steps go together.
        is_large = step.num_rows > _FEW_ROWS
        self.is_due |= is_large
        if self._synchronous or len(self._held) >= _HELD_STEPS or (is_large and self._blocks is None):
            self.flush()

    def put(self, orders: Sequence[Save]) -> None:
        """Queue saves, to be made after all that was given to `save` and launched to compute before. They are queued
        together, because waking a thread costs both threads as much as some saves take."""
        if not orders:
            return
        self.flush()
        if self._blocks is None:
            self._orders.put((orders, self._compute.fence()))
        else:
            self._save_orders(orders, self._rotations, self._compute)

    def flush(self) -> None:
        """Hand to the saving thread the steps that `save` has held back. This must be done before any later order about
        their slots is given."""
        if not self._held:
            return
        held, self._held = self._held, []
        self.is_due = False
        size = self._bytes_of(held)
        with self._drained:
            self._backlog_bytes += size
        if self._blocks is not None:
            self._save_captures(held, self._compute)
            return
        self._orders.put(held)
        with self._drained:
            # Steps before these: one step may be larger than the limit, and would not be computed while it is saved.
            limit = 0 if self._synchronous else size + self._max_backlog_bytes
            while self._backlog_bytes > limit:
                self._completions.check()
                self._drained.wait(1.0)

    def _bytes_of(self, captures: Sequence[CapturedRows]) -> int:
        """Return the bytes of all rows of these steps, even those that are not saved, since they stay in memory
        together."""
        rows = sum(capture.step.num_rows for capture in captures)
        return rows * self._slab.slot_bytes // BLOCK_TOKENS

    def close(self) -> None:
        """Let the thread finish the queued saves and end."""
        self.flush()
        self._orders.put(None)

    def run(self, rotations: KeyRotations, stream: DeviceStream) -> None:
        """Save queued rows until `close`. rotations, stream: the calling thread's."""
        while self.save_next(rotations, stream):
            pass

    def save_next(self, rotations: KeyRotations, stream: DeviceStream) -> bool:
        """Wait for the next order and carry it out. Returns False if there will be none."""
        order = self._orders.get()
        if order is None:
            return False
        if isinstance(order, list):
            self._save_captures(order, stream)
        else:
            orders, after = order
            stream.follow(after)
            self._save_orders(orders, rotations, stream)
        return True

    def _save_orders(self, orders: Sequence[Save], rotations: KeyRotations, stream: DeviceStream) -> None:
        """Carry out orders, and mark their slots as complete together at the end. No slot is filled again before the
        engine has been told that it was saved."""
        sealed, events = [], []
        is_under_way = False
        for order in orders:
            if is_under_way and not isinstance(
                order, FillFromPage
            ):  # such an order reads or seals what the steps write
                stream.fence().wait()
                is_under_way = False
            match order:
                case SealSlot():
                    if order.num_rows:
                        self._slab.clear_behind(order.slot, order.num_rows)
                        sealed.append(order.slot)
                    events.append(Saved(order.ticket))
                case FillFromSlot():
                    self._fill_from_slot(order)
                case FillFromPage():
                    stream.launch(partial(self._fill_from_page, order, rotations))
                    is_under_way = True
        if sealed:
            self._slab.seal(*sealed)
        self._completions.tell(*events)

    def _fill_from_slot(self, order: FillFromSlot) -> None:
        for rows in self._slab.parts(range(self._slab.num_layers)):
            rows[order.slot, : order.num_rows] = rows[order.source_slot, : order.num_rows]

    def _save_captures(self, captures: list[CapturedRows], stream: DeviceStream) -> None:
        """Save rows of some steps into their slots."""
        started = time.perf_counter()
        held = self._bytes_of(captures)
        size = sum(piece.num_rows for capture in captures for piece in capture.pieces) * self._slab.slot_bytes
        size //= BLOCK_TOKENS
        passed = self._throttle.book(size)
        for capture in captures:
            stream.follow(capture.ready)
        stream.launch(partial(place_rows, self._slab, captures, range(self._slab.num_layers)))
        stream.fence().wait()
        self._throttle.wait(passed)
        captures.clear()
        with self._drained:
            self._backlog_bytes -= held
            self._drained.notify_all()
        self._completions.tell(Transferred("hbm_to_dram", size, time.perf_counter() - started))

    def _fill_from_page(self, order: FillFromPage, rotations: KeyRotations) -> None:
        assert self._slab.projection is None, "pages have no activations"
        page_size = self._pages[0].k.shape[1]
        rows = torch.arange(order.num_rows, device=self._device)
        slots = rows + (order.page * page_size + order.page_row)
        positions = rows + order.position
        span = slice(order.slot_row, order.slot_row + order.num_rows)
        for layer, pages in enumerate(self._pages):
            k, v = (pages.to_numbers(gather_rows(pool, slots)) for pool in (pages.k, pages.v))
            self._slab.k(layer)[order.slot, span] = rotations.unrotate(layer, k, positions)
            self._slab.v(layer)[order.slot, span] = v
