"""Describes which part of a context is stored, and how long that description is valid."""

from dataclasses import dataclass
from typing import NamedTuple

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.table import BlockRow


@dataclass(frozen=True, slots=True)
class Match:
    """The leading rows of a context (a row is the KV of one token) that are stored in some tier: whole blocks, then the
    first `partial_rows` rows of one more."""

    rows: list[BlockRow]
    partial: BlockRow | None
    partial_rows: int

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * BLOCK_TOKENS + self.partial_rows

    @property
    def used(self) -> list[tuple[BlockRow, int]]:
        """Return (row of the table, number of the block's KV rows that are used) for each block of the match, in
        order."""
        used = [(row, BLOCK_TOKENS) for row in self.rows]
        if self.partial is not None:
            used.append((self.partial, self.partial_rows))
        return used

    def first(self, num_blocks: int) -> "Match":
        """Return the match cut to its first `num_blocks` blocks. The block that matches only in part counts as the last
        one."""
        if num_blocks > len(self.rows):
            return self
        return Match(self.rows[:num_blocks], None, 0)


class MatchBasis(NamedTuple):
    """The values that a waiting context's match depends on. While the context waits, its tokens and keys only grow."""

    table_version: int
    num_tokens: int
    recompute_from: int | None
    open_hint: BlockKey | None
    open_place: int
    skips_disk: bool
    num_unread: int


@dataclass(frozen=True, slots=True)
class RememberedMatch:
    """A match and what it depends on. It is valid until its `basis` changes or, if measured speeds decided which blocks
    are worth loading, until `Rates.version` is no longer `rates_version`."""

    basis: MatchBasis
    rates_version: int | None  # None: there was nothing to choose, so rates do not matter
    found: Match  # everything that is stored
    chosen: Match  # the part of `found` that is in HBM or worth loading
    is_rest_cheaper_to_compute: bool  # cheaper than loading it
