"""How a tier chooses what leaves."""

from collections.abc import Container, Mapping
from typing import Protocol

from cache.block import BlockKey


class EvictionPolicy(Protocol):
    """Ranks the blocks of one tier for eviction. Holds keys, never bytes."""

    def touch(self, key: BlockKey) -> None:
        """An insert or a hit."""
        ...

    def remove(self, key: BlockKey) -> None:
        """The block has left the tier."""
        ...

    def look_ahead(self, upcoming: Mapping[BlockKey, int]) -> None:
        """Blocks of queued turns and their place in line, 0 is next."""
        ...

    def victims(self, count: int, pinned: Container[BlockKey]) -> list[BlockKey]:
        """Up to `count` blocks that are not pinned, best first; changes nothing."""
        ...
