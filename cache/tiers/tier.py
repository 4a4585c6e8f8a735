"""Defines the interface by which the cache uses any tier below HBM."""

from typing import Protocol

from reprise.cache.blocks.table import BlockRow, TierName


class Tier(Protocol):
    """A place below HBM that stores copies of blocks, and writes only its own entry of `BlockRow.copies`. Each tier
    decides which blocks enter and leave it. The Hierarchy calls it, on the engine's thread; it holds no bytes.

    The interface knows only sizes and addresses of copies. Another kind of content, such as the state of a layer that
    has no KV, would be one more tier of each medium, with slots of its own size.
    """

    @property
    def name(self) -> TierName: ...

    def bytes_of(self, row: BlockRow) -> int:
        """Return the bytes of a block's copy in this tier, which must have one."""
        ...

    def touch(self, row: BlockRow) -> None:
        """Record a hit of a block that is in this tier."""
        ...

    def drop(self, row: BlockRow) -> None:
        """Forget the tier's copy of a block, if there is one. Does not check whether another tier has one."""
        ...
