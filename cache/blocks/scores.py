"""CaR's score of a block (CaR §III-B-3): how much those who wait and run need it."""

from cache.blocks.context import RunningContext
from cache.blocks.keys import BlockKey
from cache.blocks.table import CacheTable


class Scores:
    """+1 while a request that needs the block stands in the window, 2 while it runs, summed over all that share it.

    The paper counts +1 on entering, +1 on dispatch, -2 on completion; setting a request's part instead of adding to it
    comes to the same, and takes it back exactly when a request is aborted or preempted. Single-threaded, part of the
    CacheManager. A change costs the length of the request's context.
    """

    def __init__(self, *, table: CacheTable) -> None:
        self._table = table
        self._scores = table.scores
        self._given: dict[str, tuple[int, list[BlockKey]]] = {}  # request -> what it adds, and to which blocks

    def set(self, context: RunningContext, score: int) -> None:
        """What a request adds to the score of each block of its context, from now on."""
        self.clear(context.request_id)
        if score:
            hint = [context.open_hint] if context.open_hint is not None else []
            keys = [*context.chain(), *hint]
            self._given[context.request_id] = score, keys
            self._add(keys, score)

    def clear(self, request_id: str) -> None:
        """A request needs nothing any more. Forgives unknown ones."""
        score, keys = self._given.pop(request_id, (0, []))
        self._add(keys, -score)

    def of(self, key: BlockKey) -> int:
        return self._scores.get(key, 0)

    @property
    def levels(self) -> list[int]:
        """The scores that there are, 0 among them, ascending."""
        return sorted({0, *self._scores.values()})

    def _add(self, keys: list[BlockKey], score: int) -> None:
        for key in keys:
            total = self._scores[key] = self._scores.get(key, 0) + score
            if not total:
                del self._scores[key]
            row = self._table.get(key)
            if row is not None:
                row.score = total
