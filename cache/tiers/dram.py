"""Keeps account of all DRAM slots: those for blocks as rows, those for blocks that a codec has compressed (coded
slots), and what fills and empties them. Touches no bytes.

Blocks are saved in slots while they are computed (AttentionStore §3.2.2). The slots for rows are one pool: `dram_slots`
of them store blocks; the others are for blocks that are only on their way to disk. A slot is free again only when the
last copy into or out of it is done; pins (of slots that are read) and tickets (of saves) see to that.

With a codec, DRAM is two pools in one budget: slots for rows, which are few, and coded slots. A block that the codec
may compress is compressed before its rows leave, and stays in DRAM in that form.
"""

from collections.abc import Callable, Sequence

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import Orders
from reprise.cache.options import CacheOptions
from reprise.cache.policies.eviction_policy import EvictionPolicy
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.encoder import Encoder
from reprise.cache.tiers.holds import Holds
from reprise.cache.tiers.pages import PageAllocator
from reprise.cache.tiers.saves import Saves
from reprise.cache.tiers.slot_tier import SlotTier
from reprise.cache.tiers.slots import SlotPool

_BATCHES = 64
_PRESSURE_SHARE = 0.25  # share of the slots that are free or may become so; below it running turns write theirs too
_LEAST_ROWS, _MOST_ROWS = 0.25, 0.75  # shares of DRAM's bytes for rows
_WARM_ROWS_SHARE = 0.1  # share of DRAM's bytes for rows that are warm and will be coded
_NEVER_CODED_BLOCKS = 2.0  # blocks of a session: its first, and the one that is not full


def rows_share(session_blocks: float, ratio: float) -> float:
    """Return the share of DRAM's bytes that is for uncompressed blocks, the rest being for compressed ones. A session's
    first block and its open block are never compressed, so uncompressed blocks get at least their part. session_blocks:
    mean blocks of a session; 0: not known. ratio: size of a block before the codec over its size after it."""
    if session_blocks <= 0:
        return _LEAST_ROWS
    never = min(session_blocks, _NEVER_CODED_BLOCKS)
    share = never / (never + (session_blocks - never) / ratio)
    return min(max(share + _WARM_ROWS_SHARE, _LEAST_ROWS), _MOST_ROWS)


def split_dram(size_bytes: int, slot_bytes: int, coded_bytes: int, session_blocks: float = 0.0) -> tuple[int, int]:
    """Return (slots for uncompressed blocks, slots for compressed ones) of a DRAM of `size_bytes`. slot_bytes,
    coded_bytes: size of an uncompressed and of a compressed block; coded_bytes 0: there is no codec. session_blocks:
    mean blocks of a session; 0: not known."""
    if not coded_bytes:
        return size_bytes // slot_bytes, 0
    slots = int(size_bytes * rows_share(session_blocks, slot_bytes / coded_bytes)) // slot_bytes
    return slots, (size_bytes - slots * slot_bytes) // coded_bytes


class Dram:
    """The ledger of DRAM: which block lies in which slot, what is being copied into slots, and what is evicted. The
    Hierarchy and the CacheManager's other parts call it, on the engine's thread.

    rows           slots for uncompressed blocks (rows of KV)
    coded          slots for blocks that a codec has compressed; none without a codec
    saves          copies from HBM into the slots for rows, under way
    encoder        compressions from the slots for rows into coded slots, under way
    """

    def __init__(
        self,
        *,
        options: CacheOptions,
        form: CodedForm,
        table: CacheTable,
        pages: PageAllocator,
        new_policy: Callable[[], EvictionPolicy],
        holds: Holds,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        self.most_rows = options.dram_slots  # blocks that the slots of rows may keep; the others pass blocks on
        self._batch = options.dram_slots // _BATCHES
        self._table, self._dirty = table, holds.dirty
        free = options.dram_free_buffer if options.disk_bytes else 0.0
        self.coded = SlotTier(
            "coded",
            SlotPool(options.coded_slots, options.coded_block_bytes),
            most_resident=options.coded_slots,
            covered_by=None,
            table=table,
            policy=new_policy(),
            holds=holds,
            stats=stats,
        )
        self.rows = SlotTier(
            "dram",
            SlotPool(options.num_slots, options.bytes_per_token * BLOCK_TOKENS),
            most_resident=int(options.dram_slots * (1 - free)),
            covered_by="coded" if self.coded.is_on else None,
            table=table,
            policy=new_policy(),
            holds=holds,
            stats=stats,
        )
        self.saves = Saves(table=table, pages=pages, rows=self.rows, dirty=holds.dirty, orders=orders)
        self.encoder = Encoder(
            rows=self.rows,
            coded=self.coded,
            # So many blocks are encoded at once: those that leave next stand after all blocks that are never coded.
            batch=self._batch,
            form=form,
            table=table,
            dirty=holds.dirty,
            orders=orders,
            stats=stats,
        )
        self._counted = ((-1, -1), 0)  # changes of the dirty and the coded blocks, and how many were both then

    def slots_for(self, *, is_coded: bool) -> SlotTier:
        """Return the tier of slots for uncompressed blocks, or with `is_coded` the tier for compressed ones."""
        return self.coded if is_coded else self.rows

    @property
    def is_pressed(self) -> bool:
        """Whether slots are scarce, so that the blocks of running turns are written to disk too. Slots are not scarce
        in a DRAM full of blocks that are on disk, because they can be evicted for newcomers."""
        return self.rows.num_slots - self._unwritten < _PRESSURE_SHARE * self.rows.num_slots

    @property
    def room_bytes(self) -> int:
        """The bytes of KV, counted as rows, that DRAM may store for turns to come (C_mem in the paper AttentionStore):
        all blocks that may stay in DRAM, less those that have to stay because they are not on disk yet. Slots for
        blocks that are only on their way to disk do not count."""
        coded = max(0, self.coded.num_usable - self._coded_dirty)
        return (max(0, self.rows.most_resident - self._unwritten) + coded) * self.rows.slot_bytes

    @property
    def _unwritten(self) -> int:
        """The number of blocks that are still being saved, or are only in slots for rows and not on disk yet."""
        return self.saves.in_flight + self._dirty.num_blocks - self._coded_dirty

    @property
    def _coded_dirty(self) -> int:
        """The number of blocks in coded slots that are still to be written to disk."""
        if not self.coded.is_on:
            return 0
        changes = self._dirty.changes, self.coded.changes
        if self._counted[0] != changes:
            rows = (self._table.get(key) for keys in self._dirty.sessions.values() for key in keys)
            self._counted = changes, sum(row is not None and "coded" in row.copies for row in rows)
        return self._counted[1]

    @property
    def used_bytes(self) -> int:
        return self.rows.resident * self.rows.slot_bytes + self.coded.resident * self.coded.slot_bytes

    @property
    def capacity_bytes(self) -> int:
        """The bytes of all slots that store blocks, without those for blocks that are only on their way to disk."""
        return self.most_rows * self.rows.slot_bytes + self.coded.num_slots * self.coded.slot_bytes

    @property
    def in_flight(self) -> int:
        """The number of saves and encodings under way."""
        return self.saves.in_flight + self.encoder.in_flight

    def is_busy(self, name: SessionName) -> bool:
        """Return whether blocks of a session are being saved or compressed."""
        return self.encoder.concerns(name) or name in self.saves.owners()

    def drop(self, row: BlockRow) -> None:
        """Remove a block from DRAM. Does not check whether another tier has it."""
        self.rows.drop(row)
        self.coded.drop(row)

    def trim(self) -> None:
        """Evict uncompressed blocks from DRAM, in the policy's order, until no more are left than may stay there.
        Called once for all that a step has saved, because finding victims means walking past all queued blocks. With a
        codec, evicts only blocks that are in a coded slot too; `Encoder.plan` has the others compressed first."""
        if self.coded.is_on:
            if (excess := self.rows.resident - self.rows.most_resident) > 0:
                self.rows.leave_covered(max(excess, self._batch))
            return
        while (excess := self.rows.resident - self.rows.most_resident) > 0 and self.rows.make_room(excess, None):
            pass

    def shrink(self) -> None:
        """Free slots when DRAM has more uncompressed blocks than it may store: evict the excess or, with a codec, evict
        those that coded slots have too and order others to be compressed."""
        self.trim()
        if self.coded.is_on:
            self.encoder.plan()

    def on_encoded(self, job: int, taken: Sequence[bool]) -> None:
        """Record the end of an encoding (`Encoder.on_encoded`)."""
        self.encoder.on_encoded(job, taken)
        self.trim()

    def quarantine(self) -> None:
        """Stop using DRAM in this process, as `SlotTier.quarantine` does for one of its tiers."""
        self.rows.quarantine()
        self.coded.quarantine()
