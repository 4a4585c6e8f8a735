"""Evicts the least recently used block."""

from collections.abc import Collection, Container, Hashable, Sequence

from reprise.cache.blocks.keys import BlockKey


class LruPolicy:
    """A policy that evicts the block whose last use is oldest. A context's blocks are recorded as used from its tail to
    its head, so tails leave first and what stays is a usable prefix. Ignores owners, the queue and the newcomer."""

    def __init__(self) -> None:
        self._order: dict[BlockKey, None] = {}  # dict order is last-touch order

    def touch(self, key: BlockKey) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def remove(self, key: BlockKey) -> None:
        del self._order[key]

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        """Do nothing: ownership does not matter."""

    def forget(self, session: Hashable) -> None:
        """Do nothing: ownership does not matter."""

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        """Do nothing: the queue does not matter."""

    def victims(
        self,
        count: int,
        pinned: Container[BlockKey],
        *,
        newcomer: Hashable | None = None,
        spare_queued: bool = False,
    ) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        for key in self._order:
            if len(chosen) >= count:
                break
            if key not in pinned:
                chosen.append(key)
        return chosen
