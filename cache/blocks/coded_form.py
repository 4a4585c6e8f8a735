"""Knows which blocks a codec may make smaller, and which copies are coded. Pure."""

from reprise.cache.blocks.stored import is_coded
from reprise.cache.blocks.table import BlockRow


class CodedForm:
    """The rules of the coded form of blocks. All parts of a CacheManager ask it, on the engine's thread. Without a
    codec no block is coded."""

    def __init__(self, *, block_bytes: int, has_slots: bool) -> None:
        """block_bytes: size of a coded block; 0: there is no codec. has_slots: DRAM keeps coded blocks too."""
        self.block_bytes = block_bytes
        self.is_used = block_bytes > 0
        self._has_slots = has_slots
        self.is_condemned = False
        """The codec changes answers by more than it may: no coded block is found any more, and no more are made. Set by
        `Hierarchy.condemn_codec`."""

    def fits(self, row: BlockRow) -> bool:
        """Return whether a block may be coded. An open block is coded only when it is full: until then every turn reads
        and writes its rows again, and no block is coded twice."""
        return self.is_used and not (row.is_open or row.decoded or row.kept_raw)

    def awaits(self, row: BlockRow) -> bool:
        """Return whether a block is to be coded before its rows leave DRAM. A block on disk needs none: it was coded
        when it was written, if it may be coded at all."""
        may_be = self._has_slots and not self.is_condemned and self.fits(row)
        return may_be and "coded" not in row.copies and not row.is_below_dram

    def is_coded_below(self, row: BlockRow) -> bool:
        """Return whether the copy that would be read from below DRAM is coded."""
        address = row.copies.get("disk") or row.copies.get("redis")
        return self.is_used and address is not None and is_coded(address[0])

    def comes_coded(self, row: BlockRow) -> bool:
        """Return whether the copy that HBM would load is coded."""
        return row.source == "coded" if row.in_dram else self.is_coded_below(row)
