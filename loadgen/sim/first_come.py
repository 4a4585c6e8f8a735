"""FIFO by session: who began first leaves first, however often it was evicted and saved again."""

from collections.abc import Container, Hashable
from heapq import heappop, heappush

from cache.blocks.keys import BlockKey
from cache.policies.lru import LruPolicy


class FirstComePolicy(LruPolicy):
    """`cache.policies.fifo` gives who comes back a new place at the end. Here the place is that of the session's first
    save: of the two it is the one that comes near what AttentionStore publishes of FIFO."""

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[Hashable, int] = {}
        self._places: dict[BlockKey, tuple[int, int]] = {}  # (when its session began, -place in it): tails leave first
        self._heap: list[tuple[tuple[int, int], BlockKey]] = []  # of those that are resident, and some that have left

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        self._places[key] = (self._began.setdefault(session, len(self._began)), -place)

    def touch(self, key: BlockKey) -> None:
        if key not in self._order:
            heappush(self._heap, (self._places[key], key))
        super().touch(key)

    def victims(
        self,
        count: int,
        pinned: Container[BlockKey],
        *,
        newcomer: Hashable | None = None,
        spare_queued: bool = False,
    ) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        seen: dict[BlockKey, tuple[int, int]] = {}
        while self._heap and len(chosen) < count:
            place, key = heappop(self._heap)
            if key in self._order and key not in seen:
                seen[key] = place
                if key not in pinned:
                    chosen.append(key)
        for key, place in seen.items():
            heappush(self._heap, (place, key))
        return chosen
