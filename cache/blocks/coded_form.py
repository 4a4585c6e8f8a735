"""Decides which blocks a codec may compress, and tells which of a block's copies (in DRAM, on disk, in Redis) are
coded, that is compressed by it. Pure."""

from reprise.cache.blocks.stored import is_coded
from reprise.cache.blocks.table import BlockRow


class CodedForm:
    """The rules for coded copies of blocks, which a codec has compressed. All parts of a CacheManager ask it, on the
    engine's thread. Without a codec no block is coded."""

    def __init__(self, *, block_bytes: int, has_slots: bool) -> None:
        """Set up. block_bytes: size of a compressed block; 0: there is no codec. has_slots: whether DRAM stores
        compressed blocks too, not only the tiers below it."""
        self.block_bytes = block_bytes
        self.is_used = block_bytes > 0
        self._has_slots = has_slots
        self.is_condemned = False
        """Whether the codec was found to change answers by more than it may. If so, no compressed block is found any
        more, and no more are made. Set by `Hierarchy.condemn_codec`."""

    def fits(self, row: BlockRow) -> bool:
        """Return whether the codec may compress a block. An open block has to be full first, because until then every
        turn reads and writes its rows again. No block is compressed twice."""
        return self.is_used and not (row.is_open or row.decoded or row.kept_raw)

    def awaits(self, row: BlockRow) -> bool:
        """Return whether a block has to be compressed before its rows (its uncompressed KV) leave DRAM. False for a
        block with a copy on disk or in Redis: that copy was compressed when it was written, if the codec may compress
        the block at all."""
        may_be = self._has_slots and not self.is_condemned and self.fits(row)
        return may_be and "coded" not in row.copies and not row.is_below_dram

    def is_coded_below(self, row: BlockRow) -> bool:
        """Return whether the block's copy on disk or, if there is none, in Redis is compressed."""
        address = row.copies.get("disk") or row.copies.get("redis")
        return self.is_used and address is not None and is_coded(address[0])

    def comes_coded(self, row: BlockRow) -> bool:
        """Return whether a load of the block into HBM would read a compressed copy."""
        return row.source == "coded" if row.in_dram else self.is_coded_below(row)
