"""Writes the blocks that turns have left in DRAM to disk, after the turns have ended, and records their sessions
there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey, is_exact, token_bytes
from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import Orders, PutSession, WriteExtent
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.disk import DiskLedger
from reprise.cache.tiers.dram import Dram
from reprise.cache.tiers.encoder import AT_ONCE
from reprise.cache.tiers.holds import DirtyBlocks
from reprise.cache.tiers.slot_tier import SlotTier

MAX_EXTENT_BLOCKS = 512
_MAX_WRITES = 2  # most writes under way at once: disks like a short queue, and waiting blocks may become needless
_RETRY_S = 5.0  # wait after a failed write; the blocks stay in DRAM meanwhile
_EXTENT_OVERHEAD_BYTES = 3 * 4096
IsRunning = Callable[[SessionName], bool]
RecordOf = Callable[[SessionName], SessionRecord | None]
"""Returns the record of a session that is to be stored on disk; None if there is no session by this name."""


class _Kind(IntEnum):
    """The form in which a block is written: as rows, or compressed by a codec."""

    RAW = 0  # as its rows are
    ENCODED = 1  # coded by the thread that writes it: there is no coded slot for it
    CODED = 2  # out of its coded slot


@dataclass(slots=True)
class _Write:
    session: SessionName
    keys: list[BlockKey]
    slots: list[int]
    tier: SlotTier  # the tier of these slots
    size_bytes: int


class WriteBehind:
    """A part that decides which blocks and sessions are written to disk, and when. The CacheManager calls `plan` before
    every step on the engine's thread. Without a disk everything is a no-op."""

    def __init__(
        self,
        *,
        table: CacheTable,
        dram: Dram,
        disk: DiskLedger,
        form: CodedForm,
        dirty: DirtyBlocks,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        self._table, self._dram, self._disk, self._form = table, dram, disk, form
        self._saves, self._encoder = dram.saves, dram.encoder
        self._dirty, self._orders, self._stats = dirty, orders, stats
        self._writes: dict[int, _Write] = {}
        self._writing: set[SessionName] = set()
        self.unrecorded: dict[SessionName, None] = {}
        """Sessions that have changed since their record was last written to disk. Read only."""
        self._retry_s = 0.0  # time at which the disk is asked again; 0: it has not refused
        self.seen = (-1, -1)
        """The values of `DirtyBlocks.changes` and `runners` when `plan` last looked for blocks. Read only."""
        self._run: set[SessionName] = set()  # dirty sessions that were seen to run
        self._runners = -1  # `runners` when they were seen

    @property
    def in_flight(self) -> int:
        """The number of writes under way and of sessions to be recorded; 0 when idle. What waits for a disk that is not
        used does not count."""
        return len(self._writes) + (len(self.unrecorded) if self._disk.problem is None else 0)

    def is_writing(self, name: SessionName) -> bool:
        return name in self._writing

    def session_changed(self, name: SessionName) -> None:
        """Note that a session's record has to be written to disk. `plan` orders that: with the session's next extent,
        or alone."""
        if self._disk.capacity_bytes:
            self.unrecorded[name] = None
            self._disk.reborn(name)

    def forget(self, name: SessionName) -> None:
        """Forget a session that is gone. Its blocks that other sessions own too are written with those sessions."""
        for key in self._dirty.forget(name):
            left = self._table.get(key)
            if left is not None and left.in_dram and left.owners:
                self._dirty.add(left)
        self.unrecorded.pop(name, None)

    def plan(self, is_running: IsRunning, runners: int, record: RecordOf, now: float) -> None:
        """Order the writes to disk that are possible now: blocks, then records of sessions. is_running(session):
        whether a request of it runs. runners: a counter that changes whenever a request stops running, after which its
        blocks may be written. record(session): the session's record to be stored; None: the session is not known. now:
        in seconds."""
        changes = (self._dirty.changes, runners)
        # Without a change there is nothing new to write: while a turn runs, what is dirty is mostly its own.
        if changes != self.seen and self._may_write(now):
            self.seen = changes
            self._write_blocks(is_running, runners, record, now)
        self._disk.go_on(now)
        if self.unrecorded and self._disk.problem is None:
            self._record_sessions(is_running, record)

    def _may_write(self, now: float) -> bool:
        """Return whether there are blocks to write and nothing forbids it."""
        is_open = self._disk.capacity_bytes and now >= self._retry_s and not self._disk.is_quarantined
        return bool(is_open and self._disk.problem is None and len(self._writes) < _MAX_WRITES and self._dirty.sessions)

    def _write_blocks(self, is_running: IsRunning, runners: int, record: RecordOf, now: float) -> None:
        """Order writes of the blocks in DRAM of turns that have ended, and of running turns too when slots are
        scarce."""
        self._refused_until(0.0)
        pressed = self._dram.is_pressed
        if runners != self._runners:
            self._runners, self._run = runners, set()
        # Looked up only when needed: in most steps all that is dirty belongs to turns that run.
        saving: set[SessionName] | None = None
        for name in [name for name in self._dirty.sessions if pressed or name not in self._run]:
            if len(self._writes) >= _MAX_WRITES:
                return
            if self._form.is_condemned and not is_exact(name[1]):
                self._dirty.forget(name)  # no request will find it again
                continue
            if runs := is_running(name):
                self._run.add(name)
            if name in self._writing or (runs and not pressed) or self._encoder.concerns(name):
                continue
            saving = self._saves.owners() if saving is None else saving
            # Write what a turn has left as one extent: a file and its fsync cost more than a few blocks.
            if name in saving and not runs:
                continue
            keys = self._dirty.of(name)
            if any(self._saves.is_saving(key) for key in keys):
                continue
            rows = [row for key in keys if (row := self._table.get(key)) and row.in_dram and "disk" not in row.copies]
            waiting = [row for row in rows if self._form.awaits(row)]
            if len(self._encoder.encode(waiting)) < len(waiting):
                continue  # it is written when they are encoded
            if rows:
                # An extent holds one kind, out of one kind of slots; what is left is written next.
                kind = max(map(self._kind, rows))
                rows = [row for row in rows if self._kind(row) == kind]
                known = record(name) or SessionRecord(*name, context=b"", last_used_s=0.0, pinned=False, ttl_s=None)
                # Blocks that are encoded for an extent stay in memory until it is written.
                most = AT_ONCE if kind == _Kind.ENCODED else MAX_EXTENT_BLOCKS
                self._write(name, rows[:most], kind, known, now)
            else:
                self._dirty.forget(name)

    def _kind(self, row: BlockRow) -> _Kind:
        if "coded" in row.copies:
            return _Kind.CODED
        return _Kind.ENCODED if self._form.fits(row) else _Kind.RAW

    def _write(self, name: SessionName, rows: list[BlockRow], kind: _Kind, record: SessionRecord, now: float) -> None:
        is_coded, from_coded = kind != _Kind.RAW, kind == _Kind.CODED
        block_bytes = self._form.block_bytes if is_coded else self._dram.rows.slot_bytes
        size = len(rows) * block_bytes + _EXTENT_OVERHEAD_BYTES + len(record.context)
        if not self._disk.reserve(size):
            self._stats.refused["disk"] += len(rows)
            self._refused_until(now + _RETRY_S)
            self._dirty.changes += 1  # a change, so that it is tried again then
            return
        tier = self._dram.slots_for(is_coded=from_coded)
        slots = [row.copies[tier.name] for row in rows]
        for slot in slots:
            tier.pin(slot)
        job = self._orders.next_job()
        self._writes[job] = _Write(name, [row.key for row in rows], slots, tier, size)
        self._writing.add(name)
        self.unrecorded.pop(name, None)
        blocks = tuple(StoredBlock(r.key, r.parent, token_bytes(r.token_ids), r.is_open) for r in rows)
        self._orders.add(WriteExtent(job, record, blocks, tuple(slots), is_coded=is_coded, from_coded=from_coded))

    def on_written(self, job: int, extent: ExtentInfo | None, refused: Sequence[BlockKey], now: float) -> None:
        """Record the end of a write. extent: None if the disk has refused; it is tried again later. refused: blocks
        that the codec could not compress. If there are any, extent None means that they were all of the blocks."""
        self._dirty.changes += 1
        write = self._writes.pop(job)
        for key in refused:
            if (row := self._table.get(key)) is not None:
                row.kept_raw = True  # written as it is, with the next extent
        self._writing.discard(write.session)
        self._disk.give_back(write.size_bytes)
        if extent is None and refused:
            self.session_changed(write.session)
        elif extent is None:
            self._refused_until(now + _RETRY_S)
            self.session_changed(write.session)
            self._stats.refused["disk"] += len(write.keys)
            self._stats.write_failures["disk"] += 1
        else:
            keys = [block.key for block in extent.blocks]
            self._dirty.written(write.session, keys)
            self._disk.add(extent, keys)
        self._dirty.settle(write.session)
        for slot in write.slots:
            write.tier.unpin(slot)
        self._dram.trim()

    def _refused_until(self, retry_s: float) -> None:
        """Try no write before the time `retry_s`, because the disk has refused one. Until then blocks may leave DRAM
        without having been written. 0: try now."""
        self._retry_s = retry_s
        self._dirty.may_leave = retry_s > 0

    def disk_given_up(self) -> None:
        """Allow blocks to leave DRAM without having been written to disk, because the disk is not used now."""
        self._refused_until(self._retry_s or 1.0)

    def disk_taken(self) -> None:
        """Let the next `plan` write the blocks that have waited for the disk, which is used again."""
        self._refused_until(0.0)
        self._dirty.changes += 1

    def _record_sessions(self, is_running: IsRunning, record: RecordOf) -> None:
        """Write the records of changed sessions for which no extent is about to be written. An extent records its
        session too, and a record alone costs as much as half a small extent."""
        coming: set[SessionName] = set()
        if not self._retry_s and not self._disk.is_quarantined:
            coming = self._writing.union(self._dirty.sessions, self._saves.owners())
        for name in [name for name in self.unrecorded if name not in coming or is_running(name)]:
            self.unrecorded.pop(name, None)
            if (known := record(name)) is not None:
                self._orders.add(PutSession(known))
