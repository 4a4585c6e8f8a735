"""The cache table (CaR §III-B): one row per stored block, and the tree of prefixes that the blocks form."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypedDict

from reprise.cache.blocks.keys import BlockKey

SessionName = tuple[str, str, str]
"""(tenant, cache salt, session id)."""

TierName = Literal["dram", "coded", "disk", "redis"]
BELOW_HBM: tuple[TierName, ...] = ("dram", "coded", "disk", "redis")
"""The tiers below HBM, in the order in which a load prefers them. `coded` is the part of DRAM for blocks that a codec
has compressed; reports count it as `dram`."""


class Copies(TypedDict, total=False):
    """The addresses of a block below HBM: tier -> address. Each tier writes only its own entry."""

    dram: int  # slot of rows
    coded: int  # slot of a coded block
    disk: tuple[int, int]  # extent id, index in the extent
    redis: tuple[bytes, int]  # name of the extent, index in the extent


@dataclass(slots=True)
class BlockRow:
    """A block's row in the table: its key and parent, its address in each tier, size, score and owners. A row exists
    only while the block's bytes are complete in some tier. An address is set after its bytes are written, and cleared
    before they may be overwritten. The table does not know of transfers under way; only the part that ordered a
    transfer does."""

    key: BlockKey
    parent: BlockKey
    token_ids: "array[int]"  # unsigned 32 bit: a tuple of Python ints would take eight times the memory
    size_bytes: int
    session_id: str | None  # set while the block is open: private to that session
    page: int | None = None  # its address in HBM
    offset: int = 0  # first row of the block inside the page, a multiple of the block
    position: int = 0  # position of its first token in HBM, for which its keys are rotated
    copies: Copies = field(default_factory=Copies)
    place: int | None = None  # index of the block in its owners' contexts
    hops: int = 0  # number of times its keys were un-rotated; each time costs a rounding
    decoded: bool = False  # the rows that HBM has of it came out of a codec
    kept_raw: bool = False  # never to be coded: it begins a context, may hold decoded rows, or did not fit the codec
    owners: tuple[SessionName, ...] = ()
    score: int = 0  # CaR's (`reprise.cache.blocks.scores`): blocks with a low score leave HBM first

    def unstored(self) -> "BlockRow":
        """Return a copy of this row without any address. It is written out by hand because `dataclasses.replace` takes
        ten times as long."""
        return BlockRow(
            key=self.key,
            parent=self.parent,
            token_ids=self.token_ids,
            size_bytes=self.size_bytes,
            session_id=self.session_id,
            position=self.position,
            place=self.place,
            hops=self.hops,
            decoded=self.decoded,
            kept_raw=self.kept_raw,
            owners=self.owners,
            score=self.score,
        )

    @property
    def is_open(self) -> bool:
        return self.session_id is not None

    @property
    def is_saved(self) -> bool:
        """Whether the block has a copy outside HBM."""
        return bool(self.copies)

    @property
    def in_dram(self) -> bool:
        return "dram" in self.copies or "coded" in self.copies

    @property
    def tiers(self) -> list[TierName]:
        """The tiers below HBM that have the block."""
        return [tier for tier in BELOW_HBM if tier in self.copies]

    @property
    def is_below_dram(self) -> bool:
        return "disk" in self.copies or "redis" in self.copies

    @property
    def is_nowhere(self) -> bool:
        return self.page is None and not self.copies

    @property
    def source(self) -> TierName:
        """The tier from which HBM would load the block; `dram` if no tier has it."""
        for tier in BELOW_HBM:
            if tier in self.copies:
                return tier
        return "dram"

    @property
    def medium(self) -> str:
        """The tier that HBM would load the block from, as reports name it: dram (also for a compressed block in DRAM),
        disk or redis."""
        return medium_of(self.source)


def medium_of(tier: TierName) -> str:
    """Return the name of a tier in reports: `dram` for `coded`, any other tier's own name."""
    return "dram" if tier == "coded" else tier


class CacheTable:
    """A table that finds blocks: key -> row, and parent -> children. All parts of the CacheManager use it, on the
    engine's thread. It holds no bytes."""

    def __init__(self) -> None:
        self.version = 0  # another number after every change of what is stored, or where
        self.scores: dict[BlockKey, int] = {}  # scores of needed blocks, stored or not (`reprise.cache.blocks.scores`)
        self._rows: dict[BlockKey, BlockRow] = {}
        # Sorted by tokens: a system prompt has thousands of children, and those next to a text are the most similar.
        self._children: dict[BlockKey, list[tuple[array[int], BlockKey]]] = {}
        # (parent, session) -> open blocks, a few at most
        self._open: dict[tuple[BlockKey, str], dict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[BlockRow]:
        return iter(self._rows.values())

    def get(self, key: BlockKey) -> BlockRow | None:
        return self._rows.get(key)

    def publish(self, row: BlockRow) -> None:
        """Add a row, so that requests can find the block, whose bytes must be complete. Raises KeyError if the key is
        in the table."""
        if row.key in self._rows:
            raise KeyError(row.key)
        self.version += 1
        self._rows[row.key] = row
        row.score = self.scores.get(row.key, 0)
        if row.session_id is None:
            insort(self._children.setdefault(row.parent, []), (row.token_ids, row.key))
        else:
            self._open.setdefault((row.parent, row.session_id), {})[row.key] = None

    def drop(self, key: BlockKey) -> BlockRow:
        """Remove and return a row. Raises KeyError on an unknown key."""
        row = self._rows.pop(key)
        self.version += 1
        if row.session_id is None:
            siblings = self._children[row.parent]
            del siblings[bisect_left(siblings, (row.token_ids, row.key))]
            if not siblings:
                del self._children[row.parent]
        else:
            place = row.parent, row.session_id
            del self._open[place][key]
            if not self._open[place]:
                del self._open[place]
        return row

    def moved(self) -> None:
        """Increase the table's version, because a tier has changed the address of a block."""
        self.version += 1

    def forget(self, row: BlockRow) -> None:
        """Remove the row of a block that has left its last tier, unless it has been removed already."""
        if row.key in self._rows:
            self.drop(row.key)

    def matched(self, keys: Sequence[BlockKey]) -> list[BlockRow]:
        """Return the rows of the longest prefix of `keys` that is stored, whatever tier each block is in."""
        rows: list[BlockRow] = []
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                break
            rows.append(row)
        return rows

    def resident(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of `keys` are in HBM."""
        for count, key in enumerate(keys):
            row = self._rows.get(key)
            if row is None or row.page is None:
                return count
        return len(keys)

    def closest_child(
        self, parent: BlockKey, token_ids: Sequence[int], session_id: str, limit: int
    ) -> tuple[BlockRow, int] | None:
        """Return the block after `parent` that shares the most leading tokens with `token_ids` (at least one, at most
        `limit`), and how many it shares; None if there is none. Open blocks of other sessions are ignored. On a tie,
        the session's own open block wins."""
        siblings = self._children.get(parent, [])
        place = bisect_left(siblings, (array("I", token_ids),))
        before, after = range(place - 1, -1, -1), range(place, len(siblings))
        candidates = (
            *self._rows_of(self._open.get((parent, session_id), ())),
            *islice(self._rows_of(siblings[index][1] for index in before), 1),
            *islice(self._rows_of(siblings[index][1] for index in after), 1),
        )
        best: tuple[BlockRow, int] | None = None
        for row in candidates:
            shared = common_prefix(row.token_ids, token_ids, limit)
            if shared > (best[1] if best else 0):
                best = row, shared
        return best

    def _rows_of(self, keys: Iterable[BlockKey]) -> Iterator[BlockRow]:
        return (self._rows[key] for key in keys)


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Count the leading tokens that two sequences share, up to `limit`."""
    bound = min(len(left), len(right), limit)
    for index in range(bound):
        if left[index] != right[index]:
            return index
    return bound
