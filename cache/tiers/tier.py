"""The interface by which the cache speaks to a tier below HBM, whatever lies in it."""

from typing import Protocol

from reprise.cache.blocks.table import BlockRow, TierName


class Tier(Protocol):
    """A place below HBM that keeps copies of blocks, and writes its own entry of `BlockRow.copies` alone. Which blocks
    come and leave is the tier's own affair. Single-threaded, part of the CacheManager; holds no bytes.

    Only sizes and addresses of copies are known here. Another kind of content, such as the state of a layer that has no
    KV, is one more tier of each medium, with slots of its own size."""

    @property
    def name(self) -> TierName: ...

    def bytes_of(self, row: BlockRow) -> int:
        """Return the bytes that a block takes here, which it is in."""
        ...

    def touch(self, row: BlockRow) -> None:
        """Record a hit of a block that is here."""
        ...

    def drop(self, row: BlockRow) -> None:
        """Forget the copy of a block, if there is one. Does not check whether it is anywhere else."""
        ...
