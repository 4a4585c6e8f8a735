"""The ceiling: what is needed farthest in the future leaves first (Belady). For simulations, which know the future."""

from collections.abc import Collection, Container, Hashable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from cache.blocks.keys import BlockKey


class Future(Protocol):
    """What is to come, as of now."""

    def next_use(self, key: BlockKey) -> float:
        """The later, the farther; math.inf: never again."""
        ...


class BeladyPolicy:
    """Asks for a block's next use when it is touched, so the future must be as of behind that touch. Among blocks of
    the same next use the newest touch leaves first: the head of a context that is touched from its tail. The published
    ceilings were measured so; tail-first would be better by up to 0.013 of the blocks. What arrives may be the first
    to leave (bypass)."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._touches = 0
        self._rank: dict[BlockKey, tuple[float, int]] = {}  # of resident blocks, ascending: first to leave first
        self._heap: list[tuple[float, int, BlockKey]] = []  # with ranks that have been replaced since

    def touch(self, key: BlockKey) -> None:
        self._touches += 1
        rank = self._rank[key] = (-self._future.next_use(key), -self._touches)
        heappush(self._heap, (*rank, key))

    def remove(self, key: BlockKey) -> None:
        del self._rank[key]

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        """The future is known block by block."""

    def forget(self, session: Hashable) -> None:
        """The future is known block by block."""

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        """The queue is part of the future."""

    def victims(
        self,
        count: int,
        pinned: Container[BlockKey],
        *,
        newcomer: Hashable | None = None,
        spare_queued: bool = False,
    ) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        kept: list[tuple[float, int, BlockKey]] = []
        while self._heap and len(chosen) < count:
            entry = heappop(self._heap)
            if self._rank.get(entry[2]) != entry[:2]:
                continue  # touched since, or gone
            kept.append(entry)
            if entry[2] not in pinned:
                chosen.append(entry[2])
        for entry in kept:
            heappush(self._heap, entry)
        return chosen
