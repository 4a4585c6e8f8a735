"""What a tier is: bytes by key, nothing else."""

from typing import Protocol

from cache.block import BlockKey


class TierFull(Exception):
    """There is no room, or the entry alone is larger than the tier. A normal outcome: the entry is not stored."""


class BlockMissing(Exception):
    """Nothing complete and intact is stored under this key. The caller computes instead."""


class Tier(Protocol):
    """Stores bytes and decides nothing. Methods may be called from I/O threads, one call per key at a time."""

    name: str
    capacity_bytes: int

    def write(self, key: BlockKey, data: memoryview) -> None:
        """Store a copy, all of it or nothing. Raises TierFull."""
        ...

    def read(self, key: BlockKey, out: memoryview) -> None:
        """Fill `out`, whose size is that of what was written. Raises BlockMissing."""
        ...

    def delete(self, key: BlockKey) -> None:
        """Forgives unknown keys."""
        ...

    def used_bytes(self) -> int: ...
