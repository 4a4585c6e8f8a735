"""The order in which a step's rows and the cache's moves reach the transfer."""

from collections.abc import Container, Sequence

from cache.plan import CapturePiece, Move
from cache.tiers.capture import Captured
from cache.transfer import Transfer


class Moves:
    """What a step leaves is held back until its tokens are under way, which nobody shall have to wait for; whatever is
    decided later comes behind it, for it may seal or overwrite what those rows belong to. Engine's thread."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._held: tuple[Sequence[Move], Captured | None, list[CapturePiece]] | None = None

    def hold(self, moves: Sequence[Move], captured: Captured | None, pieces: list[CapturePiece]) -> None:
        """Of a step: moves, and then its rows. What was held before must have been carried out."""
        assert self._held is None
        self._held = moves, captured, pieces

    def carry_out(self, moves: Sequence[Move] = (), running: Container[str] = ()) -> None:
        """What is held, then these; see `Transfer.carry_out`."""
        if self._held is not None:
            (before, captured, pieces), self._held = self._held, None
            self._transfer.carry_out(before)
            self._transfer.save(captured, pieces)
        self._transfer.carry_out(moves, running)
