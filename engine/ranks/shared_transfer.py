"""Carries out moves of KV on all ranks, in place of rank 0's own transfer."""

import time
from collections.abc import Container, Sequence
from typing import Any

from reprise.cache.moves import CapturePiece, Event, LoadBlocks, Move, PutSession, WriteExtent
from reprise.cache.transfer.capture import Captured
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.ranks.group import RankGroup
from reprise.engine.ranks.joined_events import JoinedEvents
from reprise.engine.ranks.wire import CarryOut, SaveRows, pack

_LOOK_S = 0.001  # time between two looks at the other ranks' reports


class SharedTransfer(Transfer):
    """A Transfer for all ranks: sends every move of KV to the other ranks, makes it on rank 0 too, and reports its end
    when all ranks have made it. Extents (files with the KV of a turn) are written by rank 0 first, which chooses their
    ids. Only rank 0 stores records of sessions. Called by the engine's thread."""

    def __init__(self, *, ranks: RankGroup, **transfer: Any) -> None:
        """Set up. transfer: the arguments of `Transfer`, for this rank's part."""
        super().__init__(**transfer)
        self._ranks = ranks
        self._joined = JoinedEvents(ranks.num_ranks)

    def carry_out(self, moves: Sequence[Move], running: Container[str] = ()) -> None:
        if not moves:
            return
        self._joined.note(moves)
        self._send([move for move in moves if not isinstance(move, (WriteExtent, PutSession))], running)
        super().carry_out(moves, running)

    def _send(self, moves: Sequence[Move], running: Container[str] = ()) -> None:
        if moves:
            loads = [move.request_id for move in moves if isinstance(move, LoadBlocks)]
            self._ranks.send(CarryOut(pack(moves), [request_id for request_id in loads if request_id in running]))

    def delete(self, extent_ids: Sequence[int]) -> None:
        """Delete extents that only some ranks have, on all ranks. The cache is not told of it."""
        self._joined.delete(extent_ids)
        self._order_own()

    def _order_own(self) -> None:
        writes, self._joined.for_others = self._joined.for_others, []
        self._send(writes)
        deletions, self._joined.for_all = self._joined.for_all, []
        self.carry_out(deletions)

    def save(self, step: Captured | None, pieces: list[CapturePiece]) -> None:
        if step is not None and pieces:
            self._ranks.send(SaveRows(pieces))
        super().save(step, pieces)

    def layers_arrived(self, job_id: int) -> int:
        if self._joined.has_told(job_id):
            return self._slab.num_layers  # here; each rank waits for its own
        return super().layers_arrived(job_id)

    def poll(self) -> list[Event]:
        events = self._joined.add(0, super().poll())
        for rank, told in self._ranks.take():
            events += self._joined.add(rank, told)
        self._order_own()
        return events

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not (self._completions.has_news or self._ranks.has_news) and (left_s := until - time.monotonic()) > 0:
            super().wait(min(left_s, _LOOK_S))

    def close(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        self._ranks.send_close(timeout_s)
        ended_here = super().close(timeout_s)
        return self._ranks.close(max(0.0, until - time.monotonic())) and ended_here
