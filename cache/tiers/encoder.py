"""Decides which blocks in DRAM the codec compresses, and when: the blocks of a turn before it is written to disk, and
blocks whose slot is wanted. Touches no bytes."""

from collections.abc import Iterable, Sequence

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import EncodeBlocks, Orders
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.holds import DirtyBlocks, KeysWhere
from reprise.cache.tiers.slot_tier import SlotTier

AT_ONCE = 64  # blocks under way: their slots are held until all of them are encoded


class Encoder:
    """A part that orders blocks in DRAM to be compressed by the codec (encoded). Dram and WriteBehind call it, on the
    engine's thread. Without slots for compressed blocks everything is a no-op."""

    def __init__(
        self,
        *,
        rows: SlotTier,
        coded: SlotTier,
        batch: int,
        form: CodedForm,
        table: CacheTable,
        dirty: DirtyBlocks,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        """Set up. batch: least number of blocks that `plan` compresses at once."""
        self._rows, self._coded, self._batch, self._form = rows, coded, batch, form
        self._table = table
        self._dirty, self._orders, self._stats = dirty, orders, stats
        self._under_way: dict[int, EncodeBlocks] = {}
        self._encoding: set[BlockKey] = set()
        self._others = KeysWhere(lambda key: not self._may_go(key))

    @property
    def in_flight(self) -> int:
        """The number of encodings under way."""
        return len(self._under_way)

    def concerns(self, name: SessionName) -> bool:
        """Return whether a block of this session is being encoded."""
        return any((row := self._table.get(key)) is not None and name in row.owners for key in self._encoding)

    def encode(self, rows: Iterable[BlockRow]) -> list[BlockRow]:
        """Order the codec to compress blocks whose rows may leave DRAM only after that. Leaves some for a later call
        while many are being compressed. Returns the blocks for which there is no slot for a compressed block."""
        left: list[BlockRow] = []
        blocks: list[tuple[BlockKey, int, int]] = []
        refused: set[SessionName | None] = set()
        for row in rows:
            if len(self._encoding) >= AT_ONCE:
                break
            source = row.copies.get("dram")
            if source is None or row.key in self._encoding:
                continue
            newcomer = row.owners[0] if row.owners else None
            slot = None if newcomer in refused else self._coded.take_slot(newcomer)
            if slot is None:
                refused.add(newcomer)
                left.append(row)
                continue
            self._rows.pin(source)
            self._encoding.add(row.key)
            blocks.append((row.key, source, slot))
        if blocks:
            job = self._orders.next_job()
            self._under_way[job] = EncodeBlocks(job, tuple(blocks))
            self._orders.add(self._under_way[job])
        return left

    def plan(self) -> None:
        """Order blocks to be compressed when DRAM has more uncompressed ones than may stay: those that the policy would
        evict first. A block for which no slot for a compressed block is free leaves DRAM, as it would without a
        codec."""
        excess = self._rows.resident - self._rows.most_resident - len(self._encoding)
        if excess <= 0 or len(self._encoding) >= AT_ONCE:
            return
        keys = self._rows.policy.victims(min(max(excess, self._batch), AT_ONCE), self._others)
        if keys:
            self._rows.evict(self.encode(row for key in keys if (row := self._table.get(key)) is not None))
        elif not self._encoding:
            self._rows.make_room(excess, None)

    def _may_go(self, key: BlockKey) -> bool:
        row = self._table.get(key)
        return row is not None and key not in self._encoding and self._form.awaits(row)

    def on_encoded(self, job: int, taken: Sequence[bool]) -> None:
        """Record the end of an encoding. taken: for each block, whether the codec could compress it; one that could not
        be is stored as rows from now on."""
        self._dirty.changes += 1
        for (key, slot, target), was_taken in zip(self._under_way.pop(job).blocks, taken, strict=True):
            self._encoding.discard(key)
            row = self._table.get(key)
            is_same = (
                row is not None and row.copies.get("dram") == slot
            )  # the slot is pinned, so it holds no other block
            self._rows.unpin(slot)
            if row is None or not is_same or not was_taken or "coded" in row.copies:
                self._coded.give_back(target)
                if row is not None and is_same and not was_taken:
                    row.kept_raw = True
            else:
                self._coded.attach(row, target)
                self._stats.encoded_blocks += 1
