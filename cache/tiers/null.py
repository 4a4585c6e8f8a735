"""A tier that is turned off."""

from cache.block import BlockKey
from cache.tiers.base import BlockMissing, TierFull


class NullTier:
    """Capacity 0: everything is refused, so nobody needs an `if`."""

    capacity_bytes = 0

    def __init__(self, *, name: str) -> None:
        self.name = name

    def write(self, key: BlockKey, data: memoryview) -> None:
        raise TierFull(f"{self.name} is turned off")

    def read(self, key: BlockKey, out: memoryview) -> None:
        raise BlockMissing(f"{self.name} is turned off")

    def delete(self, key: BlockKey) -> None:
        """Nothing is ever stored."""

    def used_bytes(self) -> int:
        return 0
