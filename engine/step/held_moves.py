"""The order in which a step's rows and the cache's moves reach the transfer."""

from collections.abc import Callable, Container, Sequence

from reprise.cache.moves import CapturePiece, Move, SealSlot
from reprise.cache.transfer.capture import Captured
from reprise.cache.transfer.transfer import Transfer

_MOST_SEALS = 256  # of what waits: some milliseconds at the end of an answer


class HeldMoves:
    """What a step leaves is held back until its tokens are under way, which nobody shall have to wait for; whatever is
    decided later comes behind it, for it may seal or overwrite what those rows belong to. Blocks that kernels have
    saved by themselves may be sealed together at the end of an answer: between two steps, threads of the kernels wait
    awake for what the engine does. Engine's thread."""

    def __init__(self, transfer: Transfer, *, seals_may_wait: Callable[[], bool]) -> None:
        """seals_may_wait: whether seals may be put off now; asked only where there is something to carry out."""
        self._transfer = transfer
        self._seals_may_wait = seals_may_wait
        self._held: tuple[Sequence[Move], Captured | None, list[CapturePiece]] | None = None
        self._seals: list[Move] = []  # decided before what is held

    def hold(self, moves: Sequence[Move], captured: Captured | None, pieces: list[CapturePiece]) -> None:
        """Hold back what a step has left: moves, and then its rows. What was held before must have been carried out."""
        assert self._held is None
        if moves or captured is not None:
            self._held = moves, captured, pieces

    def carry_out(self, moves: Sequence[Move] = (), running: Container[str] = ()) -> None:
        """Carry out what is held, then these; see `Transfer.carry_out`. Nothing but seals among all that is put off
        where they may wait."""
        if not (moves or self._held or self._seals) or (self._seals_may_wait() and self._put_off(moves)):
            return
        self.carry_out_all(moves, running)

    def carry_out_all(self, moves: Sequence[Move] = (), running: Container[str] = ()) -> None:
        """Carry out the seals that wait, what is held, and then these."""
        seals, self._seals = self._seals, []
        if seals:
            self._transfer.carry_out(seals)
        if self._held is not None:
            (before, captured, pieces), self._held = self._held, None
            self._transfer.carry_out(before)
            self._transfer.save(captured, pieces)
        self._transfer.carry_out(moves, running)

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
