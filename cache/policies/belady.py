"""Implements Belady's optimal policy: the block needed farthest in the future leaves first. Only simulations know the
future."""

from collections.abc import Collection, Container, Hashable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from reprise.cache.blocks.keys import BlockKey


class Future(Protocol):
    """The future uses of blocks, which only a simulation knows."""

    def next_use(self, key: BlockKey) -> float:
        """Return when the block is used next; a larger value is later, math.inf means never."""
        ...


class BeladyPolicy:
    """A policy that evicts the block whose next use is latest. It is the upper bound for the other policies.

    The next use is asked for when a block is touched, so `future` must already describe what comes after that touch.
    Among blocks with the same next use, the block touched last leaves first. Contexts are touched from their tail to
    their head, so that block is the head of a context. The published bounds were measured this way; evicting the tail
    first would raise block hit rates by up to 0.013. A block that has just come may be evicted at once.
    """

    def __init__(self, future: Future) -> None:
        self._future = future
        self._touches = 0
        self._rank: dict[BlockKey, tuple[float, int]] = {}  # resident blocks; the smallest rank leaves first
        self._heap: list[tuple[float, int, BlockKey]] = []  # also holds outdated ranks

    def touch(self, key: BlockKey) -> None:
        self._touches += 1
        rank = self._rank[key] = (-self._future.next_use(key), -self._touches)
        heappush(self._heap, (*rank, key))

    def remove(self, key: BlockKey) -> None:
        del self._rank[key]

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        """Do nothing: the future is known block by block."""

    def forget(self, session: Hashable) -> None:
        """Do nothing: the future is known block by block."""

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        """Do nothing: the queue is part of the future."""

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
