"""Implements FIFO by session: the session that began first leaves first, however often it was evicted and saved
again."""

from collections.abc import Container, Hashable
from heapq import heappop, heappush

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies.lru import LruPolicy


class FirstComePolicy(LruPolicy):
    """A policy that ranks sessions by their first save. `reprise.cache.policies.fifo` instead gives a returning session
    a new place at the end; of the two, this one comes closer to what AttentionStore publishes for FIFO."""

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[Hashable, int] = {}
        # (number of its session in order of beginning, -place in the session): tails leave first
        self._places: dict[BlockKey, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], BlockKey]] = []  # resident blocks, and some that have left

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
