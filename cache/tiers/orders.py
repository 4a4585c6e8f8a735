"""Orders: the moves that were decided and not taken yet."""

from cache.moves import Move


class Orders:
    """The one outbox of the cache. Whoever decides on a move adds it here; whoever carries moves out takes them, in the
    order in which they were decided. Single-threaded."""

    def __init__(self) -> None:
        self._moves: list[Move] = []
        self._jobs = 0

    def next_job(self) -> int:
        """The number by which a move's end is told."""
        self._jobs += 1
        return self._jobs

    def add(self, move: Move) -> None:
        """To be carried out after all that was added before."""
        self._moves.append(move)

    def take(self) -> list[Move]:
        """The moves since the last call."""
        moves, self._moves = self._moves, []
        return moves
