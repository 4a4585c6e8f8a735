"""The oldest touch leaves first."""

from collections.abc import Container, Mapping

from cache.block import BlockKey


class LruPolicy:
    """Least recently used. A context is touched from its tail to its head, so tails leave first and what stays of a
    prefix is always usable."""

    def __init__(self) -> None:
        self._order: dict[BlockKey, None] = {}  # dict order is last-touch order

    def touch(self, key: BlockKey) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def remove(self, key: BlockKey) -> None:
        del self._order[key]

    def look_ahead(self, upcoming: Mapping[BlockKey, int]) -> None:
        """LRU judges by the past alone."""

    def victims(self, count: int, pinned: Container[BlockKey]) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        for key in self._order:
            if len(chosen) == count:
                break
            if key not in pinned:
                chosen.append(key)
        return chosen
