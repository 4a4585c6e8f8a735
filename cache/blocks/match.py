"""What is stored of a context."""

from dataclasses import dataclass
from typing import NamedTuple

from cache.blocks.keys import BLOCK_TOKENS, BlockKey
from cache.blocks.table import BlockRow


@dataclass(frozen=True, slots=True)
class Match:
    """The leading rows of a context that are stored somewhere: whole blocks, then `partial_rows` rows of one more."""

    rows: list[BlockRow]
    partial: BlockRow | None
    partial_rows: int

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * BLOCK_TOKENS + self.partial_rows

    @property
    def used(self) -> list[tuple[BlockRow, int]]:
        """(row of the table, how many of its KV rows are used), in order."""
        used = [(row, BLOCK_TOKENS) for row in self.rows]
        if self.partial is not None:
            used.append((self.partial, self.partial_rows))
        return used

    def first(self, num_blocks: int) -> "Match":
        """Its first blocks."""
        if num_blocks > len(self.rows):
            return self
        return Match(self.rows[:num_blocks], None, 0)


class MatchBasis(NamedTuple):
    """What a match of a waiting context depends on. Its tokens and keys only grow as long as it waits."""

    table_version: int
    num_tokens: int
    recompute_from: int | None
    open_hint: BlockKey | None
    open_place: int
    skips_disk: bool


@dataclass(frozen=True, slots=True)
class RememberedMatch:
    """An answer that holds until its basis or, where they had a say, the rates change."""

    basis: MatchBasis
    rates_version: int | None  # None: nothing was left to choose, whatever the rates say
    found: Match  # all that is stored
    chosen: Match  # what of it is at hand or worth loading
    is_rest_cheaper_to_compute: bool  # than to load
