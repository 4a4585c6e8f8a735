"""Keeps account of the disk: which extents it has, which copy of a block is used, and what is evicted. Touches no
bytes."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import ExtentInfo
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import DeleteExtents, Orders
from reprise.cache.policies.eviction_policy import EvictionPolicy, enter
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.holds import Holds, KeysWhere

_RETRY_AFTER_S = 5.0  # a deletion that the disk refused is tried again after this


@dataclass(slots=True)
class _Extent:
    keys: dict[BlockKey, None]  # blocks whose copy here counts
    size_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Deletion:
    extent_ids: tuple[int, ...]
    session: SessionName | None
    waiter: str | None
    with_record: bool = True  # deletes the session's record too


class DiskLedger:
    """The ledger of the disk tier: records each block's copy on disk, orders deletions and makes room. The Hierarchy
    and the CacheManager's other parts call it, on the engine's thread."""

    name: Final = "disk"

    def __init__(
        self,
        *,
        table: CacheTable,
        capacity_bytes: int,
        policy: EvictionPolicy,
        holds: Holds,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        self.capacity_bytes = capacity_bytes  # 0: there is no disk
        self.policy = policy
        self.used_bytes = 0  # after all writes and deletions that were ordered
        self.is_quarantined = False
        self.problem: str | None = None
        """Why the disk is not used now, for people; None: it is used. The Hierarchy sets it."""
        self._table, self._stats = table, stats
        self._pinned, self._dirty, self._orders = holds.pinned, holds.dirty, orders
        self._extents: dict[int, _Extent] = {}
        self._deletions: dict[int, _Deletion] = {}  # deletions under way, by job
        self.refused: list[_Deletion] = []
        """Deletions that the disk refused. They are tried again, so that their bytes do not stay on disk. Read only."""
        self._again_s = math.inf
        self.ended_deletions: list[tuple[str, bool]] = []
        """Requests that waited for a deletion which has ended, each with whether it succeeded. If the disk refused it,
        bytes may remain, and it is tried again. `SessionDeletions.take_ended` clears this."""
        self._read: Counter[BlockKey] = Counter()  # blocks that loads and fetches read off the disk
        self._held = KeysWhere(self._is_held)

    @property
    def in_flight(self) -> int:
        """The number of deletions under way."""
        return len(self._deletions)

    # --- what is there ------------------------------------------------------------------------------------------------

    def add(self, extent: ExtentInfo, keys: Sequence[BlockKey]) -> None:
        """Record an extent that was written. keys: its blocks, in order. Those that are still stored, have an owner and
        no other copy on disk are read from it from now on. If there are none, the extent is deleted."""
        self._extents[extent.extent_id] = _Extent({}, extent.size_bytes, len(extent.blocks))
        self.used_bytes += extent.size_bytes
        for index, key in enumerate(keys):
            row = self._table.get(key)
            # A block whose owners are gone meanwhile does not belong on disk.
            if row is not None and "disk" not in row.copies and row.owners:
                self._attach(row, extent.extent_id, index)
        if not self._extents[extent.extent_id].keys:
            self.delete([extent.extent_id], None, None)

    def bytes_of(self, row: BlockRow) -> int:
        """Return the bytes that a block takes on disk: those of its KV rows, or its part of the extent file that it
        lies in, if that is smaller."""
        extent = self._extents[row.copies["disk"][0]]
        return min(row.size_bytes, extent.size_bytes // extent.num_blocks)

    def has(self, extent_id: int) -> bool:
        return extent_id in self._extents

    def adopt(self, extent: ExtentInfo, rows: Sequence[BlockRow]) -> None:
        """Record an extent that an earlier process has left on disk. rows: its blocks, in order. Called in the order in
        which the extents were written, so that the newest copy of a block is used."""
        self._extents[extent.extent_id] = _Extent({}, extent.size_bytes, len(extent.blocks))
        self.used_bytes += extent.size_bytes
        for index, row in enumerate(rows):
            known = self._table.get(row.key)
            if known is None:
                self._table.publish(row)
                known = row
            else:
                known.owners = tuple(dict.fromkeys((*known.owners, *row.owners)))
                self._detach(known)
            self._attach(known, extent.extent_id, index)

    def _attach(self, row: BlockRow, extent_id: int, index: int) -> None:
        row.copies["disk"] = extent_id, index
        self._table.moved()
        self._extents[extent_id].keys[row.key] = None
        enter(self.policy, row)

    def _detach(self, row: BlockRow) -> int | None:
        """Stop using a block's copy on disk. Returns the id of its extent if no other block's copy in it is used."""
        copy = row.copies.pop("disk", None)
        if copy is None:
            return None
        extent_id = copy[0]
        self._table.moved()
        self.policy.remove(row.key)
        extent = self._extents[extent_id]
        extent.keys.pop(row.key, None)
        return None if extent.keys else extent_id

    def sharers_of(self, rows: Iterable[BlockRow]) -> list[BlockRow]:
        """Return the blocks that share an extent with one of `rows`, have other owners, and are not in DRAM."""
        extents = {row.copies["disk"][0] for row in rows if "disk" in row.copies}
        names = {owner for row in rows for owner in row.owners}
        keys = (key for extent in extents for key in self._extents[extent].keys)
        found = (self._table.get(key) for key in keys)
        return [row for row in found if row is not None and not row.in_dram and set(row.owners) - names]

    # --- what is read -------------------------------------------------------------------------------------------------

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """Keep these blocks on disk until `release`, because they are being read."""
        self._read.update(keys)

    def release(self, keys: Iterable[BlockKey]) -> None:
        self._read.subtract(keys)
        self._read += Counter()  # forgets those at zero

    def _is_held(self, key: BlockKey) -> bool:
        """Return whether a block must stay on disk, because a block of its extent is being read or is pinned: extents
        are deleted as a whole."""
        row = self._table.get(key)
        if row is None or "disk" not in row.copies:
            return True
        if not (self._read or self._pinned):
            return False
        return any(
            self._read[other] > 0 or self._is_pinned(other) for other in self._extents[row.copies["disk"][0]].keys
        )

    def _is_pinned(self, key: BlockKey) -> bool:
        row = self._table.get(key)
        return row is not None and self._pinned.own(row)

    # --- what leaves --------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Reserve room for an extent of at most `size` bytes until `give_back`, deleting other extents for it. Returns
        False if too few extents may be deleted."""
        if not self._make_room(size):
            return False
        self.used_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """End a reservation of `size` bytes: either the room is not needed, or the written extent has been counted."""
        self.used_bytes -= size

    def _make_room(self, size: int) -> bool:
        while self.used_bytes + size > self.capacity_bytes:
            victims = self.policy.victims(1, self._held, spare_queued=True)
            if not victims:
                return False
            row = self._table.get(victims[0])
            assert row is not None
            extent_id = row.copies["disk"][0]
            self._stats.evictions["disk"] += len(self._extents[extent_id].keys)
            # Do not write it again although DRAM may have it: it would take the room of another, and so on for ever.
            self.delete([extent_id], None, None, write_again=False)
        return True

    def touch(self, row: BlockRow) -> None:
        """Record a hit of a block that is on disk."""
        self.policy.touch(row.key)

    def drop(self, row: BlockRow) -> None:
        """Stop using a block's copy on disk, which is bad or not wanted any more. Its extent is deleted if no other
        block in it is used."""
        empty = self._detach(row)
        if empty is not None:
            self.delete([empty], None, None)

    def delete(
        self, extent_ids: list[int], session: SessionName | None, waiter: str | None, *, write_again: bool = True
    ) -> None:
        """Order whole extents to be deleted. session: a session whose record is deleted too, or None. waiter: id of a
        client's request, which `ended_deletions` will list when the deletion has ended; None: no request waits.
        write_again: whether those of their blocks that DRAM still has are to be written to disk again."""
        self._take_out(extent_ids, write_again)
        if not self.capacity_bytes:
            self._answer(waiter, is_done=True)
            return
        self._delete(_Deletion(tuple(extent_ids), session, waiter))

    def lost(self, extent_ids: Iterable[int]) -> None:
        """Forget extents whose files another process has deleted."""
        self._take_out([extent_id for extent_id in extent_ids if extent_id in self._extents], write_again=True)

    def _take_out(self, extent_ids: Iterable[int], write_again: bool) -> None:
        for extent_id in extent_ids:
            extent = self._extents.pop(extent_id)
            self.used_bytes -= extent.size_bytes
            for key in list(extent.keys):
                row = self._table.get(key)
                if row is None:
                    continue
                row.copies.pop("disk", None)
                self._table.moved()
                self.policy.remove(key)
                if write_again and row.in_dram and row.owners:
                    self._dirty.add(row)
                if row.is_nowhere:
                    self._table.forget(row)

    def _delete(self, deletion: _Deletion) -> None:
        job = self._orders.next_job()
        self._deletions[job] = deletion
        session = deletion.session if deletion.with_record else None
        self._orders.add(DeleteExtents(job, deletion.extent_ids, session))

    def on_deleted(self, job: int, problem: str | None, now: float) -> None:
        """Record the end of a deletion, and list the request that waits for it in `ended_deletions`. problem: why bytes
        may remain; if there is one, the deletion is tried again later. now: in seconds."""
        deletion = self._deletions.pop(job)
        if problem is None:
            # A waiter may also wait for the session's other salts, whose deletions came before.
            name = deletion.session
            self._answer(deletion.waiter, is_done=name is None or not self.undone(name[0], name[2]))
            return
        self._answer(deletion.waiter, is_done=False)
        self.refused.append(replace(deletion, waiter=None))
        self._again_s = now + _RETRY_AFTER_S

    def _answer(self, waiter: str | None, *, is_done: bool) -> None:
        if waiter is not None:
            self.ended_deletions.append((waiter, is_done))

    def undone(self, tenant: str, session_id: str) -> list[SessionName]:
        """Return the sessions of this tenant and id, one for each salt, whose deletion the disk has refused."""
        names = [deletion.session for deletion in self.refused if deletion.session is not None]
        return [name for name in names if (name[0], name[2]) == (tenant, session_id)]

    def reborn(self, session: SessionName) -> None:
        """Keep the record of a session that has begun again, if the disk has refused to delete an earlier session with
        its name: trying that deletion again deletes only the extents."""
        if self.refused:
            same = [deletion.session == session for deletion in self.refused]
            self.refused = [
                replace(d, with_record=d.with_record and not s) for d, s in zip(self.refused, same, strict=True)
            ]

    def delete_again(self, session: SessionName, waiter: str) -> bool:
        """Try a refused deletion of a session again. waiter: the id of the request that waits for it from now on.
        Returns False if no deletion of this session has been refused."""
        found = next((deletion for deletion in self.refused if deletion.session == session), None)
        if found is not None:
            self.refused.remove(found)
            self._delete(replace(found, waiter=waiter))
        return found is not None

    def quarantine(self) -> None:
        """Stop using the disk in this process, and everything on it, because it gave wrong results although the
        checksums were right."""
        for row in list(self._table):
            self.drop(row)
            if row.is_nowhere:
                self._table.forget(row)
        self.is_quarantined = True

    def go_on(self, now: float) -> None:
        """Try refused deletions again, if some seconds have passed since the disk refused them."""
        if now >= self._again_s and self.problem is None:
            undone, self.refused, self._again_s = self.refused, [], math.inf
            for deletion in undone:
                self._delete(deletion)
