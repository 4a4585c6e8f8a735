"""Computes CaR's score of a block (CaR §III-B-3): how much waiting and running requests need it."""

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import CacheTable


class Scores:
    """A table of the scores by which blocks are evicted from HBM. A block's score is the sum over all requests that
    need it: 1 while a request is in the queue's window (its next few requests) and 2 while it runs. The scheduler's
    view of the cache sets it, on the engine's thread.

    The paper CaR adds 1 when a request enters the window, adds 1 on dispatch and subtracts 2 on completion. Setting
    what a request adds gives the same sums, and an abort or a preemption removes exactly what the request had added. A
    change costs time linear in the length of the request's context.
    """

    def __init__(self, *, table: CacheTable) -> None:
        self._table = table
        self._scores = table.scores
        self._given: dict[str, tuple[int, list[BlockKey]]] = {}  # request -> what it adds, and to which blocks

    def set(self, request_id: str, score: int, keys: list[BlockKey]) -> None:
        """Set what a request adds to the score of each block in `keys`, those of its context."""
        self.clear(request_id)
        if score:
            self._given[request_id] = score, keys
            self._add(keys, score)

    def clear(self, request_id: str) -> None:
        """Remove what a request adds to its blocks' scores. An unknown request is ignored."""
        score, keys = self._given.pop(request_id, (0, []))
        self._add(keys, -score)

    def of(self, key: BlockKey) -> int:
        return self._scores.get(key, 0)

    @property
    def levels(self) -> list[int]:
        """The distinct scores in use, and 0, ascending."""
        return sorted({0, *self._scores.values()})

    def _add(self, keys: list[BlockKey], score: int) -> None:
        for key in keys:
            total = self._scores[key] = self._scores.get(key, 0) + score
            if not total:
                del self._scores[key]
            row = self._table.get(key)
            if row is not None:
                row.score = total
