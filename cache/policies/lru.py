"""The oldest touch leaves first."""

from collections.abc import Collection, Container, Hashable, Sequence

from cache.blocks.keys import BlockKey


class LruPolicy:
    """Least recently used. A context is touched from its tail to its head, so tails leave first and what stays of a
    prefix is always usable. Judges by the past alone: owners, the queue and the newcomer count for nothing."""

    def __init__(self) -> None:
        self._order: dict[BlockKey, None] = {}  # dict order is last-touch order

    def touch(self, key: BlockKey) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def remove(self, key: BlockKey) -> None:
        del self._order[key]

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        """Whose a block is does not count."""

    def forget(self, session: Hashable) -> None:
        """Whose a block was does not count."""

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        """The queue does not count."""

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
