"""The cache table (CaR §III-B): one row per block that is stored somewhere, and the tree of prefixes they form."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.block import BlockKey


@dataclass(slots=True)
class BlockRow:
    """NodeID, address, size, validity, score and owner of one block. A row exists only while the block's bytes are
    complete somewhere: it is published after they are written and dropped before they are overwritten."""

    key: BlockKey
    parent: BlockKey
    token_ids: "array[int]"  # unsigned 32 bit: a tuple of Python ints would take eight times the memory
    page: int  # its address in HBM
    offset: int  # first row of the block inside the page, a multiple of the block
    size_bytes: int
    session_id: str | None  # set while the block is open: private to that session
    score: float = 0.0  # CaR's: small leaves first
    valid_in_gpu: bool = True

    @property
    def is_open(self) -> bool:
        return self.session_id is not None


class CacheTable:
    """BlockKey -> row, and parent -> children. Single-threaded; holds no bytes."""

    def __init__(self) -> None:
        self._rows: dict[BlockKey, BlockRow] = {}
        self._children: dict[BlockKey, dict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[BlockRow]:
        return iter(self._rows.values())

    def get(self, key: BlockKey) -> BlockRow | None:
        return self._rows.get(key)

    def publish(self, row: BlockRow) -> None:
        """Make a complete block findable. Raises KeyError if the key is there already."""
        if row.key in self._rows:
            raise KeyError(row.key)
        self._rows[row.key] = row
        self._children.setdefault(row.parent, {})[row.key] = None

    def drop(self, key: BlockKey) -> BlockRow:
        row = self._rows.pop(key)
        siblings = self._children[row.parent]
        del siblings[key]
        if not siblings:
            del self._children[row.parent]
        return row

    def matched(self, keys: Sequence[BlockKey]) -> list[BlockRow]:
        """The rows of the longest resident prefix of a chain."""
        rows: list[BlockRow] = []
        for key in keys:
            row = self._rows.get(key)
            if row is None or not row.valid_in_gpu:
                break
            rows.append(row)
        return rows

    def closest_child(
        self, parent: BlockKey, token_ids: Sequence[int], session_id: str, limit: int
    ) -> tuple[BlockRow, int] | None:
        """The child of `parent` that shares the most leading tokens with `token_ids` (at most `limit`, at least one)
        and that many. Open blocks of other sessions do not count. Equal candidates: the session's own open block."""
        best: tuple[BlockRow, int] | None = None
        for key in self._children.get(parent, ()):
            row = self._rows[key]
            own = row.session_id == session_id
            if not row.valid_in_gpu or (row.is_open and not own):
                continue
            shared = common_prefix(row.token_ids, token_ids, limit)
            if shared and (best is None or shared > best[1] or (shared == best[1] and own)):
                best = row, shared
        return best


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """How many leading tokens two sequences share, counting at most `limit`."""
    bound = min(len(left), len(right), limit)
    for index in range(bound):
        if left[index] != right[index]:
            return index
    return bound
