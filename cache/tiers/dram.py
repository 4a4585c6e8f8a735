"""LowerTiers: what lies below HBM. What fills and leaves DRAM, fetches, and writes behind a turn.

Pure bookkeeping: it orders moves and is told of their end by events. Blocks are saved in DRAM slots while they are
computed (AttentionStore §3.2.2) and written to disk behind the end of the turn. The slots are one pool (`slots.py`):
`dram_slots` of them may stay, the rest is for what passes through on its way to disk or was refused. What is on disk is
known to `disk.py`. A slot is free again only when the last copy into or out of it is done, which is what pins and
tickets are for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cache.blocks.context import SessionContext
from cache.blocks.keys import BlockKey, token_bytes
from cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from cache.blocks.table import BlockRow, CacheTable, SessionName
from cache.moves import FetchBlocks, Move, PutSession, SealSlot, WriteExtent
from cache.policies.eviction_policy import EvictionPolicy, enter
from cache.stats import CacheStats
from cache.tiers.disk import DiskLedger, Keys
from cache.tiers.slots import SlotPool

_MAX_EXTENT_BLOCKS = 512
_MAX_WRITES = 2  # under way at once: disks like a short queue, and what waits can still be superseded
_RETRY_S = 5.0  # after a failed write; the blocks stay in DRAM meanwhile
_PRESSURE = 0.25  # share of the slots, free or to be had for what comes, below which running turns write theirs too
_EXTENT_OVERHEAD = 3 * 4096


@dataclass(slots=True)
class _Ticket:
    """A save under way: the row to be, and its slot. row None: the slot is only given back."""

    row: BlockRow | None
    slot: int


@dataclass(slots=True)
class _Write:
    session: SessionName
    keys: list[BlockKey]
    slots: list[int]
    size_bytes: int


class DramTier:
    """Single-threaded, part of the CacheManager. With no slots everything is a no-op."""

    def __init__(
        self,
        *,
        table: CacheTable,
        num_slots: int,
        dram_slots: int,
        slot_bytes: int,
        disk_bytes: int,
        free_buffer: float,
        dram_policy: EvictionPolicy,
        disk_policy: EvictionPolicy,
        stats: CacheStats,
        gone: Callable[[BlockRow], None],
    ) -> None:
        self.num_slots = num_slots
        self.dram_slots = dram_slots
        self.slot_bytes = slot_bytes
        self.disk_bytes = disk_bytes
        self.dram_policy = dram_policy
        self.disk_policy = disk_policy
        self.resident = 0  # slots that hold a block of the table
        self.changes = 0  # events after which `plan_writes` may find something to write
        self.moves: list[Move] = []
        self.quarantined: set[str] = set()
        self.pinned_sessions: set[SessionName] = set()
        self._table = table
        self._stats = stats
        self._gone = gone
        # What is on disk too is lost by nobody, so room for what comes can be made ahead (DESIGN "dram_free_buffer").
        self._target = int(dram_slots * (1 - free_buffer)) if disk_bytes else dram_slots
        self._tickets: dict[int, _Ticket] = {}
        self._saving: dict[BlockKey, int] = {}  # key -> its ticket
        self._held: dict[int, tuple[list[int], list[int]]] = {}  # slot being filled -> pages and slots it comes from
        self._dirty: dict[SessionName, dict[BlockKey, None]] = {}
        self._writes: dict[int, _Write] = {}
        self._writing: set[SessionName] = set()
        self._unrecorded: dict[SessionName, None] = {}  # sessions that have changed since the disk was told of them
        self._retry_s = 0.0
        self._run: set[SessionName] = set()  # of `_dirty`, those that ran when they were looked at, as of
        self._runners = -1
        self._fetches: dict[int, tuple[tuple[BlockKey, tuple[int, int], int], ...]] = {}
        self._fetching: set[BlockKey] = set()
        self._jobs = 0
        self._immovable = Keys(self.is_immovable)
        self.slots = SlotPool(num_slots)
        self.extents = DiskLedger(
            table=table,
            capacity_bytes=disk_bytes,
            policy=disk_policy,
            stats=stats,
            gone=gone,
            is_kept=lambda row: self._is_pinned(row) or row.key in self._fetching,
            write_again=self._write_again,
            order=lambda move: self.moves.append(move),
            next_job=self.next_job,
        )

    @property
    def is_on(self) -> bool:
        return self.num_slots > 0

    @property
    def is_pressed(self) -> bool:
        """Whether slots are scarce: turns that run write what they have, too. What is on disk leaves for whatever
        comes, so a DRAM that is full of it is not."""
        return self.num_slots - self._unwritten < _PRESSURE * self.num_slots

    @property
    def in_flight(self) -> int:
        """Copies under way, and sessions to be recorded; zero at idle."""
        return (
            len(self._tickets) + len(self._writes) + len(self._fetches) + self.extents.in_flight + len(self._unrecorded)
        )

    def next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def is_saving(self, key: BlockKey) -> bool:
        return key in self._saving

    def is_fetching(self, key: BlockKey) -> bool:
        return key in self._fetching

    def is_moving(self, key: BlockKey) -> bool:
        """Whether it is being saved or fetched."""
        return key in self._saving or key in self._fetching

    # --- slots --------------------------------------------------------------------------------------------------------

    def take_slot(self, newcomer: SessionName | None) -> int | None:
        """A slot to be filled. If none is free a block leaves DRAM for it; with a newcomer only one that should leave
        before a block of that session."""
        if "dram" in self.quarantined:
            return None
        if not self.slots.num_free and self.resident:
            for key in self.dram_policy.victims(1, self._immovable, newcomer=newcomer):
                self._evict_from_dram(key)
        return self.slots.take()

    @property
    def room_bytes(self) -> int:
        """C_mem: what DRAM may keep of turns to come. That is what `trim` leaves there, less what has to stay until it
        is on disk; staging slots keep nothing."""
        return max(0, self._target - self._unwritten) * self.slot_bytes

    def has_room(self) -> bool:
        """Whether DRAM would keep one more block."""
        return self._kept < self._target and self.slots.num_free > 0

    @property
    def _kept(self) -> int:
        """Blocks in DRAM, and those on their way there that shall stay."""
        return self.resident + len(self._fetching)

    @property
    def _unwritten(self) -> int:
        """Blocks that are not on disk yet, or still being saved."""
        return len(self._tickets) + sum(map(len, self._dirty.values()))

    def is_immovable(self, key: BlockKey) -> bool:
        """Whether a block must not leave DRAM now: read by somebody, not on disk yet, or pinned by its owner."""
        row = self._table.get(key)
        if row is None or row.slot is None or self.slots.is_pinned(row.slot):
            return True
        if row.extent is None and not self._retry_s and any(key in dirty for dirty in self._dirty_of(row)):
            return True  # not on disk yet; if the disk refuses, DRAM must go on without it
        return self._is_pinned(row)

    def _dirty_of(self, row: BlockRow) -> list[dict[BlockKey, None]]:
        return [self._dirty[owner] for owner in row.owners if owner in self._dirty]

    def _is_pinned(self, row: BlockRow) -> bool:
        return bool(self.pinned_sessions) and any(owner in self.pinned_sessions for owner in row.owners)

    # --- saving -------------------------------------------------------------------------------------------------------

    def seal(self, slot: int, row: BlockRow | None, num_rows: int) -> None:
        """Everything that fills `slot` is ordered. row: as it will stand in the table (its addresses are ignored)."""
        ticket = self.next_job()
        self._tickets[ticket] = _Ticket(row, slot)
        if row is not None:
            self._saving[row.key] = ticket
        self.moves.append(SealSlot(ticket, slot, num_rows if row is not None else 0))

    def hold_slot(self, slot: int, source: int) -> None:
        """`slot` is filled from another slot, which keeps its bytes until that is done."""
        self.slots.pin(source)
        self._held.setdefault(slot, ([], []))[1].append(source)

    def hold_page(self, slot: int, page: int) -> None:
        """`slot` is filled from a page, pinned by the caller, that is named by `on_saved` when it is done."""
        self._held.setdefault(slot, ([], []))[0].append(page)

    def cancel_save(self, key: BlockKey) -> None:
        """The block is not wanted any more."""
        ticket = self._saving.pop(key, None)
        if ticket is not None:
            self.changes += 1
            self._tickets[ticket].row = None

    def on_saved(self, ticket_id: int) -> list[int]:
        """Returns the pages that it was saved from, to be unpinned."""
        self.changes += 1
        ticket = self._tickets.pop(ticket_id)
        pages, slots = self._held.pop(ticket.slot, ([], []))
        for slot in slots:
            self.slots.unpin(slot)
        if ticket.row is None:
            self.slots.give_back(ticket.slot)
            return pages
        row = ticket.row
        del self._saving[row.key]
        known = self._table.get(row.key)
        if known is None:
            row.page = row.slot = row.extent = None
            self._attach_slot(row, ticket.slot)
            self._table.publish(row)
            known = row
        elif known.slot is None:
            self._attach_slot(known, ticket.slot)
        else:
            self.slots.give_back(ticket.slot)
            return pages
        if self.disk_bytes and known.extent is None and known.owners:
            self._dirty.setdefault(known.owners[0], {})[known.key] = None
        return pages

    def _attach_slot(self, row: BlockRow, slot: int) -> None:
        row.slot = slot
        self.resident += 1
        enter(self.dram_policy, row)

    def trim(self) -> None:
        """Let blocks leave DRAM until it is within its bounds, those first that the policy says. Once for all that a
        step has saved: to find who leaves means to walk past all that is queued."""
        while (excess := self.resident - self._target) > 0:
            victims = self.dram_policy.victims(excess, self._immovable)
            if not victims:
                return
            for key in victims:
                self._evict_from_dram(key)

    def _evict_from_dram(self, key: BlockKey) -> None:
        row = self._table.get(key)
        assert row is not None
        self.drop_slot(row)
        self._stats.evictions["dram"] += 1
        if row.is_nowhere:
            self._gone(row)

    def drop_slot(self, row: BlockRow) -> None:
        """The block has left DRAM. Does not look whether it is anywhere else."""
        if row.slot is None:
            return
        slot, row.slot = row.slot, None
        self.resident -= 1
        self.dram_policy.remove(row.key)
        for dirty in self._dirty_of(row):
            dirty.pop(row.key, None)
        self.slots.give_back(slot)

    # --- disk ---------------------------------------------------------------------------------------------------------

    def may_write(self, now: float) -> bool:
        """Whether there is something to be written to disk, and nothing that forbids it."""
        is_open = self.disk_bytes and now >= self._retry_s and "disk" not in self.quarantined
        return bool(self._dirty and is_open and len(self._writes) < _MAX_WRITES)

    def plan_writes(
        self,
        sessions: Mapping[SessionName, SessionContext],
        is_running: Callable[[SessionName], bool],
        runners: int,
        record: Callable[[SessionName, SessionContext | None], SessionRecord],
        now: float,
    ) -> None:
        """Write what turns have left in DRAM; of running turns too when slots get scarce. runners: the same number as
        long as nobody has ceased to run. Call it if `may_write`."""
        self._retry_s = 0.0
        pressed = self.is_pressed
        if runners != self._runners:
            self._runners, self._run = runners, set()
        # Looked up only when it is needed: in most steps all that is dirty belongs to who runs.
        saving: set[SessionName] | None = None
        for name in [name for name in self._dirty if pressed or name not in self._run]:
            if len(self._writes) >= _MAX_WRITES:
                return
            if runs := is_running(name):
                self._run.add(name)
            if name in self._writing or (runs and not pressed):
                continue
            saving = self._owners_saving() if saving is None else saving
            # What a turn has left is one extent: a file and its fsync cost more than a few blocks.
            if name in saving and not runs:
                continue
            keys = self._dirty[name]
            if any(key in self._saving for key in keys):
                continue
            rows = [row for key in keys if (row := self._table.get(key)) and row.slot is not None and not row.extent]
            if not rows:
                del self._dirty[name]
                continue
            self._write(name, rows[:_MAX_EXTENT_BLOCKS], record(name, sessions.get(name)), now)

    def _write(self, name: SessionName, rows: list[BlockRow], record: SessionRecord, now: float) -> None:
        size = len(rows) * self.slot_bytes + _EXTENT_OVERHEAD + len(record.context)
        if not self.extents.make_room(size):
            self._stats.refused["disk"] += len(rows)
            self._retry_s = now + _RETRY_S
            self.changes += 1  # tried again then, whatever happens until then
            return
        slots = [row.slot for row in rows if row.slot is not None]
        for slot in slots:
            self.slots.pin(slot)
        job = self.next_job()
        self._writes[job] = _Write(name, [row.key for row in rows], slots, size)
        self._writing.add(name)
        self._unrecorded.pop(name, None)
        self.extents.used_bytes += size
        blocks = tuple(StoredBlock(r.key, r.parent, token_bytes(r.token_ids), r.is_open) for r in rows)
        self.moves.append(WriteExtent(job, record, blocks, tuple(slots)))

    def on_written(self, job: int, extent: ExtentInfo | None, now: float) -> None:
        self.changes += 1
        write = self._writes.pop(job)
        self._writing.discard(write.session)
        self.extents.used_bytes -= write.size_bytes
        dirty = self._dirty.get(write.session, {})
        if extent is None:
            self._retry_s = now + _RETRY_S
            self.session_changed(write.session)
            self._stats.refused["disk"] += len(write.keys)
            self._stats.write_failures["disk"] += 1
        else:
            for key in write.keys:
                dirty.pop(key, None)
            self.extents.add(extent, write.keys)
        if not dirty:
            self._dirty.pop(write.session, None)
        for slot in write.slots:
            self.slots.unpin(slot)
        self.trim()

    def _write_again(self, row: BlockRow) -> None:
        """The block's only copy on disk is gone, but DRAM has it."""
        self.changes += 1
        self._dirty.setdefault(row.owners[0], {})[row.key] = None

    def is_busy(self, name: SessionName) -> bool:
        """Whether blocks of a session are being saved, fetched or written."""
        if name in self._writing:
            return True
        if name in self._owners_saving():
            return True
        return any((row := self._table.get(key)) is not None and name in row.owners for key in self._fetching)

    def _owners_saving(self) -> set[SessionName]:
        rows = (self._tickets[ticket].row for ticket in self._saving.values())
        return {owner for row in rows if row is not None for owner in row.owners}

    def disown_saves(self, name: SessionName) -> None:
        """A session is gone: what is being saved of it will not be its."""
        for ticket in self._tickets.values():
            if ticket.row is not None and name in ticket.row.owners:
                ticket.row.owners = tuple(owner for owner in ticket.row.owners if owner != name)

    def delete_session(self, name: SessionName, rows: Iterable[BlockRow], waiter: str | None) -> None:
        """Remove these blocks from DRAM and disk, and the extents they are in; `waiter` is named when it is done. Other
        blocks of those extents lose their copy on disk, and are written again if DRAM has them."""
        extent_ids: dict[int, None] = {}
        for row in rows:
            self.drop_slot(row)
            if row.extent is not None:
                extent_ids[row.extent[0]] = None
        for key in self._dirty.pop(name, {}):
            left = self._table.get(key)
            if left is not None and left.slot is not None and left.owners:
                self._write_again(left)  # it goes to disk with another's blocks
        self._unrecorded.pop(name, None)
        self.extents.delete(list(extent_ids), name, waiter)

    def session_changed(self, name: SessionName) -> None:
        """The disk has to know: by its next extent, which says the same, or by `record_sessions`."""
        if self.disk_bytes:
            self._unrecorded[name] = None
            self.extents.reborn(name)

    @property
    def must_record(self) -> bool:
        """Whether there are sessions that the disk has to be told of."""
        return bool(self._unrecorded)

    def record_sessions(
        self,
        sessions: Mapping[SessionName, SessionContext],
        is_running: Callable[[SessionName], bool],
        record: Callable[[SessionName, SessionContext | None], SessionRecord],
    ) -> None:
        """Record those changed sessions of which no extent is about to be written: a record of its own costs as much as
        half a small extent. Call it if `must_record`, behind `plan_writes`."""
        coming: set[SessionName] = set()
        if not self._retry_s and "disk" not in self.quarantined:
            coming = self._writing | self._dirty.keys() | self._owners_saving()
        for name in [name for name in self._unrecorded if name not in coming or is_running(name)]:
            self._unrecorded.pop(name, None)
            if name in sessions:
                self.moves.append(PutSession(record(name, sessions[name])))

    def quarantine(self, tier: str) -> None:
        """What came out of a tier was wrong although it was intact: nothing in it is believed, and it is not used again
        by this process."""
        for row in list(self._table):
            if tier == "dram":
                self.drop_slot(row)
            else:
                self.extents.drop(row)
            if row.is_nowhere:
                self._gone(row)
        self.quarantined.add(tier)

    # --- fetching -----------------------------------------------------------------------------------------------------

    def fetch(self, rows: Iterable[BlockRow], newcomer: SessionName) -> bool:
        """Disk -> DRAM for a turn that is queued, as far as DRAM may keep it (AttentionStore §3.3.1): at the expense of
        what should leave before it, never in slots that `trim` would empty again. False: not all."""
        blocks = []
        wanted = [row for row in rows if row.extent and row.slot is None and row.key not in self._fetching]
        if (excess := self._kept + len(wanted) - self._target) > 0:
            for key in self.dram_policy.victims(excess, self._immovable, newcomer=newcomer):
                self._evict_from_dram(key)
        for row in wanted[: max(0, self._target - self._kept)]:
            slot = self.take_slot(newcomer)
            if slot is None:
                break
            assert row.extent is not None
            self._fetching.add(row.key)
            blocks.append((row.key, row.extent, slot))
        if blocks:
            job = self.next_job()
            self._fetches[job] = tuple(blocks)
            self.moves.append(FetchBlocks(job, tuple(blocks)))
        return len(blocks) == len(wanted)

    def on_fetched(self, job: int, failed: Mapping[BlockKey, str]) -> None:
        for key, extent, slot in self._fetches.pop(job):
            self._fetching.discard(key)
            row = self._table.get(key)
            if key in failed:
                self._stats.load_failures[failed[key]] += 1
                if row is not None and row.extent == extent:
                    self.extents.drop(row)
                    if row.is_nowhere:
                        self._gone(row)
            elif row is not None and row.slot is None and row.extent == extent:
                self._attach_slot(row, slot)
                continue
            self.slots.give_back(slot)

    def keep(self, key: BlockKey, slot: int) -> None:
        """A block passed through this slot on its way from disk: keep it, if it is still wanted."""
        row = self._table.get(key)
        if row is not None and row.slot is None and row.extent is not None:
            self._attach_slot(row, slot)
        else:
            self.slots.give_back(slot)
