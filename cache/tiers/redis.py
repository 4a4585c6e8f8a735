"""Keeps account of Redis: which blocks have a copy there, and what is uploaded next. Touches no bytes.

Extents in Redis are immutable, shared with other servers, and may vanish at any time: by their time to live, by Redis'
own eviction, or because their session was deleted elsewhere. So a copy in this ledger may be gone. A load of such a
copy fails, and the copy is then forgotten.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from reprise.cache.blocks.keys import BlockKey, tokens_of
from reprise.cache.blocks.stored import ExtentInfo, RedisExtent
from reprise.cache.blocks.table import BlockRow, CacheTable, SessionName
from reprise.cache.moves import NOT_ITS_COPY, DeleteRemote, DropRemote, Orders, ReadHeaders, RenewRemote, UploadExtent
from reprise.cache.options import CacheOptions
from reprise.cache.returns.return_times import ReturnTimes
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.disk import DiskLedger

_MAX_UPLOADS = 2  # uploads under way at once: few, so that the most valuable is chosen late
_MAX_WANTED_EXTENTS = 1 << 16  # extents that wait to be uploaded; the oldest are left out
_RENEW_S = 60.0  # least time between two renewals of what one session uses
_RETRY_S = 2.0  # wait after Redis has refused an upload or a deletion
_UNANSWERED = frozenset({"io", "deadline"})
_UNKNOWN_GAP_S = 3600.0  # assumed time to the next use of a session whose rhythm is not known


@dataclass(frozen=True, slots=True)
class _Upload:
    extent_id: int
    session: SessionName


@dataclass(frozen=True, slots=True)
class _Deletion:
    tenant: str
    session_id: str
    waiter: str | None


class RedisLedger:
    """The ledger of the Redis tier: records the copies there and orders uploads, renewals and deletions. The Hierarchy
    and the CacheManager's other parts call it, on the engine's thread. Without Redis everything is a no-op."""

    name: Final = "redis"

    def __init__(
        self,
        *,
        options: CacheOptions,
        table: CacheTable,
        disk: DiskLedger,
        returns: ReturnTimes,
        orders: Orders,
        stats: CacheStats,
    ) -> None:
        self.is_on, self.capacity_bytes = bool(options.head_key), options.redis_bytes
        self._table, self._disk, self._returns = table, disk, returns
        self._orders, self._stats = orders, stats
        self._bytes_per_token, self._unix_offset_s = options.bytes_per_token, options.unix_offset_s
        self._wanted: dict[int, SessionName] = {}  # extents on disk that are to be uploaded, oldest first
        self._uploads: dict[int, _Upload] = {}  # uploads under way, by job
        self._deletions: dict[int, _Deletion] = {}  # deletions under way, by job
        self._renewals: dict[int, tuple[SessionName, Collection[BlockKey]]] = {}  # renewals under way, by job
        self._refused: list[_Deletion] = []  # deletions that will be tried again
        self._undeleted: set[str] = set()  # waiters whose deletion Redis has refused
        self._retry_s = -math.inf
        self.used_bytes = 0  # bytes of all servers' extents, by the books of a few seconds ago
        self.num_blocks = 0  # blocks that have a copy which counts
        self.uploaded: list[SessionName] = []
        """Sessions for which an upload has ended. `SessionStore.take_heads` clears it."""

    @property
    def in_flight(self) -> int:
        """The number of uploads and deletions under way."""
        return len(self._uploads) + len(self._deletions)

    def bytes_of(self, row: BlockRow) -> int:
        """Return the bytes of a block's rows, which is the most that it takes in Redis; a block that the codec has
        compressed takes less."""
        return row.size_bytes

    # --- what is there ------------------------------------------------------------------------------------------------

    def add(self, extent: RedisExtent) -> None:
        """Record an extent that was uploaded: its blocks that are still in the table have a copy in Redis."""
        for index, block in enumerate(extent.blocks):
            row = self._table.get(block.key)
            if row is not None and "redis" not in row.copies:
                self._attach(row, extent.name, index)

    def adopt(self, extent: RedisExtent, name: SessionName, wanted: Iterable[BlockKey]) -> None:
        """Record which of the `wanted` blocks are in an extent of another server, for a session that is taken over."""
        keys = set(wanted)
        for index, block in enumerate(extent.blocks):
            if block.key not in keys:
                continue
            row = self._table.get(block.key)
            if row is None:
                tokens = tokens_of(block.token_ids)
                row = BlockRow(
                    key=block.key,
                    parent=block.parent,
                    token_ids=tokens,
                    size_bytes=len(tokens) * self._bytes_per_token,
                    session_id=extent.session.session_id if block.is_open else None,
                    kept_raw=True,  # not known whether it begins a context, or holds decoded rows
                    owners=(name,),
                )
                self._table.publish(row)
            if "redis" not in row.copies:
                self._attach(row, extent.name, index)

    def _attach(self, row: BlockRow, name: bytes, index: int) -> None:
        row.copies["redis"] = name, index
        self.num_blocks += 1
        self._table.moved()

    def touch(self, row: BlockRow) -> None:
        """Do nothing: a touch does not extend a copy's life in Redis. `settle`, after a load from Redis, and `renew`,
        after a turn, extend it."""

    def drop(self, row: BlockRow) -> None:
        """Forget a block's copy in Redis. Does not check whether another tier has the block."""
        if row.copies.pop("redis", None) is not None:
            self.num_blocks -= 1
            self._table.moved()

    def settle(
        self,
        copies: Mapping[BlockKey, tuple[bytes, int]],
        failed: Mapping[BlockKey, str],
        name: SessionName,
        now: float,
    ) -> None:
        """Record that blocks were loaded or fetched for a session from these copies, except those in `failed`. Extends
        the life of useful extents. Deletes an extent with a damaged block, so that other servers do not try it either,
        and forgets all copies in it."""
        damaged = {extent for key, (extent, _) in copies.items() if failed.get(key, "late") not in NOT_ITS_COPY}
        used: dict[bytes, None] = {}
        for key, copy in copies.items():
            row = self._table.get(key)
            if copy[0] not in damaged:
                if key not in failed:
                    used[copy[0]] = None
            elif row is not None and row.copies.get("redis") == copy:
                self.drop(row)
                if row.is_nowhere:
                    self._table.forget(row)
        if damaged:
            self._orders.add(DropRemote(tuple(sorted(damaged))))
        if used:
            self._renew(list(used), name, list(copies), now)

    def renew(self, name: SessionName, keys: Collection[BlockKey], renewed_s: float, now: float) -> float:
        """Extend the life of the extents that a turn has used, even if it was loaded from another tier. Otherwise a
        session that this server always serves from its own memory would expire in Redis, and be lost when the server
        dies. renewed_s: time of the session's last renewal; within a minute of it this does nothing. Returns the time
        of the latest renewal."""
        if now - renewed_s < _RENEW_S:
            return renewed_s
        if names := self.names_of(keys):
            self._renew(names, name, keys, now)
        return now

    def _renew(self, names: Sequence[bytes], session: SessionName, keys: Collection[BlockKey], now: float) -> None:
        job = self._orders.next_job()
        self._renewals[job] = session, keys
        self._orders.add(RenewRemote(job, tuple(names), self.next_use_s(session, now)))

    def on_renewed(self, job: int, missing: Collection[bytes]) -> None:
        """Record which extents have left Redis before they could be renewed. Their blocks are uploaded again from disk.
        Copies of blocks that no other tier has are not forgotten here: a load finds out that they are gone."""
        name, keys = self._renewals.pop(job)
        rows = [self._table.get(key) for key in keys] if missing else []
        for row in rows:
            if row is None or "redis" not in row.copies or row.copies["redis"][0] not in missing:
                continue
            if row.in_dram or row.page is not None or "disk" in row.copies:
                self.drop(row)
                self.want_session(name, [row.key])
                self.uploaded.append(name)

    def names_of(self, keys: Iterable[BlockKey]) -> list[bytes]:
        """Return the names of the extents that have copies of these blocks, each once, in the blocks' order."""
        rows = (self._table.get(key) for key in keys)
        return list(dict.fromkeys(row.copies["redis"][0] for row in rows if row is not None and "redis" in row.copies))

    def leading_tokens(self, keys: Iterable[BlockKey]) -> int:
        """Return how many tokens of a context, from the first on, have a copy in Redis."""
        tokens = 0
        for key in keys:
            row = self._table.get(key)
            if row is None or "redis" not in row.copies:
                break
            tokens += len(row.token_ids)
        return tokens

    # --- what is uploaded ---------------------------------------------------------------------------------------------

    def want(self, extent: ExtentInfo) -> None:
        """Note that an extent, which was written to disk, is to be uploaded to Redis; `plan` orders the upload."""
        if self.is_on:
            self._wanted[extent.extent_id] = extent.session.names
            if len(self._wanted) > _MAX_WANTED_EXTENTS:
                del self._wanted[next(iter(self._wanted))]

    def want_session(self, name: SessionName, keys: Iterable[BlockKey]) -> None:
        """Note that those extents of a session which are on disk but not in Redis, such as those of an earlier process,
        are to be uploaded; `plan` orders the uploads. keys: of the session's blocks."""
        if self.is_on:
            under_way = {upload.extent_id for upload in self._uploads.values()}
            for key in keys:
                row = self._table.get(key)
                extent = row.copies.get("disk") if row is not None and "redis" not in row.copies else None
                if extent is not None and extent[0] not in under_way:
                    self._wanted.setdefault(extent[0], name)

    def plan(self, now: float) -> None:
        """Order the uploads that are due, those of the sessions most worth keeping first, and order again the deletions
        that Redis refused. Does nothing for some seconds after an upload or a deletion has failed."""
        if now < self._retry_s:
            return
        while self._wanted and len(self._uploads) < _MAX_UPLOADS:
            extent_id = max(self._wanted, key=lambda one: self._returns.rank(self._wanted[one]))
            name = self._wanted.pop(extent_id)
            if self._disk.has(extent_id):
                job = self._orders.next_job()
                self._uploads[job] = _Upload(extent_id, name)
                self._orders.add(UploadExtent(job, extent_id, self.next_use_s(name, now)))
        refused, self._refused = self._refused, []
        for deletion in refused:
            self.delete(deletion.tenant, deletion.session_id, None)

    @property
    def has_work(self) -> bool:
        """Whether extents are to be uploaded or refused deletions are to be tried again, so that `plan` has work."""
        return bool(self._wanted or self._refused)

    def next_use_s(self, name: SessionName, now: float) -> float:
        """Return the Unix time at which a session is expected to be used next."""
        return self._unix_offset_s + now + (self._returns.gap_s(name) or _UNKNOWN_GAP_S)

    def is_uploading(self, name: SessionName) -> bool:
        return any(upload.session == name for upload in self._uploads.values())

    def on_uploaded(self, job: int, extent: RedisExtent | None, reason: str | None, now: float) -> None:
        """Record the end of an upload. extent: None if nothing was stored. If Redis did not answer, the upload is tried
        again."""
        upload = self._uploads.pop(job)
        if extent is not None:
            self.add(extent)
            self.uploaded.append(upload.session)
            return
        self._stats.write_failures["redis"] += 1
        self._retry_s = now + _RETRY_S
        if reason in _UNANSWERED and self._disk.has(upload.extent_id):
            self._wanted[upload.extent_id] = upload.session

    # --- what is adopted ----------------------------------------------------------------------------------------------

    def read_headers(self, names: Sequence[bytes]) -> int:
        """Order the headers of extents to be read. Returns the job number that HeadersRead will have."""
        job = self._orders.next_job()
        self._orders.add(ReadHeaders(job, tuple(names)))
        return job

    # --- what leaves --------------------------------------------------------------------------------------------------

    def delete(self, tenant: str, session_id: str, waiter: str | None) -> None:
        """Delete everything that Redis has of a tenant's sessions with one id, whatever their salts. waiter: id of
        a client's request that waits for it; `waits` tells whether the deletion is still under way."""
        if not self.is_on:
            return
        names = (tenant, session_id)
        self._wanted = {one: name for one, name in self._wanted.items() if (name[0], name[2]) != names}
        job = self._orders.next_job()
        self._deletions[job] = _Deletion(tenant, session_id, waiter)
        self._orders.add(DeleteRemote(job, tenant, session_id))

    def on_deleted(self, job: int, problem: str | None, now: float) -> None:
        """Record the end of a deletion. problem: why bytes may remain; if there is one, the deletion is tried again."""
        deletion = self._deletions.pop(job)
        if problem is not None:
            self._refused.append(deletion)
            self._retry_s = now + _RETRY_S
            if deletion.waiter is not None:
                self._undeleted.add(deletion.waiter)

    def waits(self, waiter: str) -> bool:
        """Return whether a deletion for which this client's request waits is under way."""
        return any(deletion.waiter == waiter for deletion in self._deletions.values())

    def take_refusal(self, waiter: str) -> bool:
        """Return whether Redis has refused a deletion for which this client's request waited, and forget the
        refusal."""
        found = waiter in self._undeleted
        self._undeleted.discard(waiter)
        return found
