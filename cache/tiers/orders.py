"""Holds the moves that were decided until they are carried out."""

from cache.moves import Move


class Orders:
    """The one outbox of the cache. Whoever decides on a move adds it here; whoever carries moves out takes them, in the
    order in which they were decided. Single-threaded."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        """What `take` would return. Read only."""
        self._jobs = 0

    def next_job(self) -> int:
        """Return a new number, by which the end of a move will be reported."""
        self._jobs += 1
        return self._jobs

    def add(self, move: Move) -> None:
        """Order a move, to be carried out after all that were added before."""
        self.moves.append(move)

    def take(self) -> list[Move]:
        """Return the moves added since the last call."""
        moves, self.moves = self.moves, []
        return moves
