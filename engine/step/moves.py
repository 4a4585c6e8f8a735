"""Hands a step's rows and the cache's moves to the transfer, and tells the cache which moves have ended."""

from collections.abc import Container, Sequence

from reprise.cache.manager import CacheManager
from reprise.cache.moves import CapturePiece, CopyRows, Move, SealSlot, Transferred
from reprise.cache.transfer.capture import Captured
from reprise.cache.transfer.transfer import Transfer
from reprise.scheduler.schedule import Schedule
from reprise.scheduler.scheduler import Scheduler

_LOAD_WAIT_S = 0.005  # longest wait for KV while nothing can run; new requests wait as long
_MOST_SEALS = 256  # most seals that wait: some milliseconds at the end of an answer


class StepMoves:
    """A mediator between the cache, which decides moves of KV between tiers, and the transfer, which makes them. The
    step calls it, on the engine's thread.

    Unless kernels have saved them already, the KV rows that a step has computed are saved in DRAM only after its tokens
    are sent, because no token may wait for that. Moves that are decided later come after these rows, because they may
    seal the slots of the rows (mark their blocks as complete) or overwrite them.

    Where kernels save KV rows by themselves, their blocks are sealed together at the end of an answer, as long as no
    turn comes or ends and HBM has room. Sealing them after each step would cost time: between two steps, threads of the
    kernels wait without sleeping, until the engine starts the next one.
    """

    def __init__(self, *, cache: CacheManager, transfer: Transfer, scheduler: Scheduler) -> None:
        self._cache, self._transfer, self._scheduler = cache, transfer, scheduler
        self.load_seconds = 0.0
        """Seconds of all transfers into HBM since the start, added up even if they ran at the same time."""
        self._held: tuple[Sequence[Move], Captured | None, list[CapturePiece]] | None = None
        self._seals: list[Move] = []  # seals that wait; decided before what is held
        self._changes = 0  # `CacheManager.changes` at the last look
        self._is_steady = False  # no request has come, ended or given way lately

    def catch_up(self, now: float) -> list[str]:
        """Start the moves of KV and the saves that were held back after the last step, and tell the cache which moves
        have ended. Returns the ids of sequences whose load has failed."""
        changes, self._changes = self._changes, self._cache.changes
        self._is_steady = changes == self._changes
        self._carry_out()
        return self.hear_failed(now)

    def hear_failed(self, now: float) -> list[str]:
        """Tell the cache which moves of KV have ended. Returns the ids of sequences whose load has failed and that have
        to start anew."""
        self.hear(now)
        return self._cache.requests.take_failed()

    def hear(self, now: float) -> None:
        """Tell the cache which moves of KV have ended, and how."""
        for event in self._transfer.poll():
            if isinstance(event, Transferred) and event.direction.endswith("to_hbm"):
                self.load_seconds += event.seconds
            self._cache.on_event(event, now)

    def order_next(self, now: float) -> None:
        """Have the cache decide which moves of KV to make while the next step runs, and start them. Copies inside HBM
        are not among them, since they belong to a step."""
        self._cache.plan(self._scheduler.upcoming(), self._scheduler.num_starting, now)
        self._carry_out(self._cache.take_moves())

    def begin_step(self, schedule: Schedule) -> None:
        """Start the moves of KV that were held back after the last step, then those that this step needs."""
        if schedule.preempted:
            self._is_steady = False
        running = {chunk.sequence.request_id for chunk in schedule.chunks}
        self._carry_out(self._cache.take_moves(), running)

    def hold(self, captured: Captured | None, pieces: list[CapturePiece]) -> None:
        """Keep the moves of KV decided in a step, and then the rows that it has computed, until its tokens are sent.
        captured: the tensors that have the KV rows to save; None if there are none. pieces: which of these rows go to
        which DRAM slots. Call it only while nothing is held back."""
        assert self._held is None
        moves = self._cache.take_moves()
        if moves or captured is not None:
            self._held = moves, captured, pieces

    def carry_out_held(self) -> None:
        """Start the moves of KV and the saves of rows that were held back, after the postponed seals (which mark blocks
        as complete)."""
        self._carry_out_all((), ())

    def fail(self) -> None:
        """Start all moves of KV that were decided up to now, in a step that has failed and before it. Copies inside HBM
        are left out, because their sources may be half written."""
        self._carry_out_all([move for move in self._cache.take_moves() if not isinstance(move, CopyRows)], ())

    def wait(self) -> None:
        """Wait a moment for the transfers, because everything that could run waits for its KV."""
        self._transfer.wait(_LOAD_WAIT_S)

    def _carry_out(self, moves: Sequence[Move] = (), running: Container[str] = ()) -> None:
        """Carry out the moves and saves that were held back after the last step, then `moves`. If all of them are seals
        that may wait, postpone them. running: ids of the requests that take part in the step."""
        if (moves or self._held or self._seals) and not (self._seals_may_wait() and self._put_off(moves)):
            self._carry_out_all(moves, running)

    def _carry_out_all(self, moves: Sequence[Move], running: Container[str]) -> None:
        seals, self._seals = self._seals, []
        if seals:
            self._transfer.carry_out(seals)
        if self._held is not None:
            (before, captured, pieces), self._held = self._held, None
            self._transfer.carry_out(before)
            self._transfer.save(captured, pieces)
        self._transfer.carry_out(moves, running)

    def _seals_may_wait(self) -> bool:
        """Return whether seals, which mark saved blocks as complete, may wait. They may not after a turn has come or
        ended, nor while a turn waits to start: a block that is sealed late can leave HBM only late, to make room for
        that turn."""
        scheduler = self._scheduler
        return self._is_steady and not scheduler.num_waiting and self._cache.is_roomy(len(scheduler.running))

    def _put_off(self, moves: Sequence[Move]) -> bool:
        before: Sequence[Move] = ()
        if self._held is not None:
            before, captured, _ = self._held
            if captured is not None:
                return False
        if before or moves:
            seals = [move for move in (*before, *moves) if isinstance(move, SealSlot)]
            if len(seals) < len(before) + len(moves) or len(self._seals) + len(seals) > _MOST_SEALS:
                return False
            self._seals += seals
        self._held = None
        return True
