"""Keeps the contexts that turns have left, for their time to live, and records which session owns which block."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from reprise.cache.blocks.context import SessionContext, digest_of
from reprise.cache.blocks.head import BadHead, HeadToTell, SessionHead, decode_head, encode_head
from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, is_exact, tokens_of
from reprise.cache.blocks.stored import ExtentInfo, RedisExtent, SessionRecord
from reprise.cache.blocks.table import BlockRow, SessionName
from reprise.cache.options import CacheOptions
from reprise.cache.requests.context import RequestContext
from reprise.cache.requests.opening import DomainOf
from reprise.cache.requests.running import Requests
from reprise.cache.session_deletions import SessionDeletions
from reprise.cache.tiers.hierarchy import Hierarchy

_SWEEP_BATCH = 100  # sessions that expire at once: a tenth of a millisecond each, and a step waits


class SessionStore:
    """A store of sessions' contexts between their turns. The Lifecycle reports ended turns, the engine's loop calls
    `sweep` and `restore`, and requests about sessions arrive here, all on the engine's thread."""

    def __init__(
        self,
        *,
        options: CacheOptions,
        tiers: Hierarchy,
        running: Requests,
        domain_of: DomainOf,
    ) -> None:
        self.contexts: OrderedDict[SessionName, SessionContext] = OrderedDict()  # oldest use first; others only read it
        self._with_own_ttl: set[SessionName] = set()  # sessions that have a `ttl_s`; some may be gone
        self.mean_bytes = 0.0  # mean size of a session's context; recent turns count most
        self._tiers, self._table = tiers, tiers.table
        self._running = running
        self._domain_of = domain_of
        self._session_ttl_s, self._max_sessions = options.session_ttl_s, options.max_sessions
        self._bytes_per_token = options.bytes_per_token
        hbm_bytes = options.hbm_bytes_per_token
        self._hbm_bytes_per_token = options.bytes_per_token if hbm_bytes is None else hbm_bytes
        self._unix_offset_s = options.unix_offset_s
        self._head_key = options.head_key
        self._changed: dict[SessionName, None] = {}  # sessions whose head is to be told
        # Adoptions under way, by job, with the request that waits for each.
        self._adoptions: dict[int, tuple[str, SessionName, SessionHead]] = {}
        self._adopted: list[tuple[str, str | None]] = []  # requests whose adoption has ended since `take_adopted`
        self.deletions = SessionDeletions(
            contexts=self.contexts, tiers=tiers, running=running, max_sessions=options.max_sessions
        )

    def is_running(self, name: SessionName) -> bool:
        """Return whether a request of a session runs or waits."""
        return bool(self._running.of(name))

    @property
    def mean_tokens(self) -> float:
        """The mean tokens of a session's context; recent turns count most. 0 while there is none."""
        return self.mean_bytes / self._bytes_per_token

    def blocks_of(self, name: SessionName) -> dict[str, int]:
        """Return tier -> number of blocks of a session's context that are in the tier."""
        return self._per_tier(name, lambda row, tier: 1)

    def bytes_of(self, name: SessionName) -> dict[str, int]:
        """Return tier -> bytes of a session's context that are in the tier."""
        return self._per_tier(name, self._bytes_in)

    def _bytes_in(self, row: BlockRow, tier: str) -> int:
        if tier == "hbm":
            return len(row.token_ids) * self._hbm_bytes_per_token
        return self._tiers.bytes_in(row, tier)

    def _per_tier(self, name: SessionName, weight: Callable[[BlockRow, str], int]) -> dict[str, int]:
        """Return tier -> sum of the weights of the blocks of a session's context that are in the tier."""
        counts = {"hbm": 0, "dram": 0, "disk": 0} | ({"redis": 0} if self._tiers.redis.is_on else {})
        session = self.contexts[name]
        for key in session.all_keys:
            row = self._table.get(key)
            if row is not None:
                places = (row.page is not None, row.in_dram, "disk" in row.copies, "redis" in row.copies)
                for tier, is_there in zip(counts, places, strict=False):
                    counts[tier] += weight(row, tier) if is_there else 0
        return counts

    def configure(self, name: SessionName, *, pinned: bool | None, ttl_s: float | None) -> None:
        """Pin a session or set its time to live. Pinned sessions never expire, and their saved blocks are not evicted.
        None leaves a value as it is."""
        session = self.contexts[name]
        if pinned is not None:
            session.pinned = pinned
            (self._tiers.pinned.add if pinned else self._tiers.pinned.discard)(name)
        if ttl_s is not None:
            session.ttl_s = ttl_s
            self._with_own_ttl.add(name)
        self._tiers.writes.session_changed(name)

    def prefetch(self, name: SessionName, now: float) -> None:
        """Note that a client has announced a turn of a session. LookAhead fetches the session's KV into DRAM later,
        when the disk and Redis have nothing more urgent to do."""
        self._tiers.announced.add(name, now)

    # --- a turn ends --------------------------------------------------------------------------------------------------

    def remember(self, context: RequestContext, num_tokens: int, open_key: BlockKey | None, now: float) -> None:
        """Record that a turn has ended and that its session's context is now the first `num_tokens` tokens of
        `context`. open_key: key of the open block, which has the last rows; None: there is none."""
        full = num_tokens // BLOCK_TOKENS
        name = context.session
        context.chain()
        before = self.contexts.pop(name, None)
        if before is not None and before.open_key not in (None, open_key):
            # A branch of the same session ended elsewhere, or the block is full now: no request can use it any more.
            self._tiers.forget(before.open_key)
        session = SessionContext(
            lineage=context.lineage.first(full) if full < len(context.keys) else context.lineage,
            open_key=open_key,
            open_tokens=tuple(context.token_ids[full * BLOCK_TOKENS : num_tokens]),
            last_used_s=now,
            cuts=context.cuts.ranges,
            client_cuts=context.cuts.by_client,
            turns=before.turns + 1 if before else 1,
            pinned=before.pinned if before else False,
            ttl_s=before.ttl_s if before else None,
            dropped=context.cuts.dropped,
            recalled=context.cuts.recalled,
            attention={key: context.cuts.attention[key] for key in context.keys if key in context.cuts.attention},
            owned={
                key: None
                for key in (*(before.owned if before else ()), *context.rows.published)
                if key in self._table or self._tiers.dram.saves.is_saving(key)
            },
        )
        if session.cuts:
            conversation = context.conversation
            session.cut_digest = digest_of(conversation[: session.cuts[-1][1]])
            end = num_tokens + session.truncated_tokens
            session.cut_conversation = context.domain.chain(
                conversation[:end], context.conversation_keys()[: end // BLOCK_TOKENS]
            )
        self.contexts[name] = session
        self._end_if_condemned(name, session)
        self.deletions.expired.pop(name, None)
        self._take_over(name, session)
        self._tiers.answered(name, now, num_tokens)
        self._count_size(num_tokens)
        self._tiers.writes.session_changed(name)
        if self._tiers.redis.is_on:
            self._tiers.redis.want_session(name, session.all_keys)
            renewed_s = session.renewed_s if before is None else before.renewed_s
            session.renewed_s = self._tiers.redis.renew(name, session.all_keys, renewed_s, now)
            self._changed[name] = None
        if len(self.contexts) > self._max_sessions:
            self.sweep(now)

    def _count_size(self, num_tokens: int) -> None:
        size = float(num_tokens * self._bytes_per_token)
        self.mean_bytes += (size - self.mean_bytes) * (0.1 if self.mean_bytes else 1.0)

    def _take_over(self, name: SessionName, session: SessionContext) -> None:
        """Make a session an owner of all blocks of its context that are stored."""
        for place, key in enumerate(session.all_keys):
            row = self._table.get(key)
            if row is not None:
                session.owned[key] = None
                self._tiers.own(row, name, place)

    def write_behind(self, now: float) -> None:
        """Order the writes of blocks and session records to disk that are possible now."""
        running = self._running
        self._tiers.writes.plan(running.has_pages, running.changes, self._record, now)

    def _record(self, name: SessionName) -> SessionRecord | None:
        session = self.contexts.get(name)
        if session is None:
            return None
        return SessionRecord(
            *name,
            context=session.pack(),
            last_used_s=session.last_used_s + self._unix_offset_s,
            pinned=session.pinned,
            ttl_s=session.ttl_s,
        )

    def hand_over(self, context: RequestContext, open_key: BlockKey | None) -> None:
        """Give the blocks of a request that has ended another owner, because its context does not become the session's
        (nothing was computed, or the conversation does not continue from it). The owner is the session's earlier
        context, or else another running request of the session. If there is neither, forget the blocks that no other
        session owns. open_key: key of the open block with the request's last rows, which no request will look for."""
        name = context.session
        session = self.contexts.get(name)
        if open_key is not None and (session is None or session.open_key != open_key):
            self._tiers.forget(open_key)
        heirs = [] if session is None else [session.owned]
        heirs += [other.rows.published for other in self._running.of(name)]
        if heirs:
            heirs[0].update(context.rows.published)
            return
        self.deletions.disown(name, context.rows.published)
        for key in context.rows.published:
            row = self._table.get(key)
            if row is None or not row.owners:
                self._tiers.forget(key)  # no session's time to live would ever end it
        self._tiers.forget_session(name)

    # --- a session goes on elsewhere, or comes from there -------------------------------------------------------------

    def take_heads(self) -> list[HeadToTell]:
        """Return the heads (records by which another server can take over a session) of the sessions of which a turn or
        an upload to Redis has ended since the last call of this method; none without Redis."""
        redis = self._tiers.redis
        uploaded = redis.uploaded
        if not (self._changed or uploaded):
            return []
        self._changed.update(dict.fromkeys(uploaded))
        uploaded.clear()
        changed, self._changed = self._changed, {}
        heads = []
        for name in changed:
            record = self._record(name)
            if record is not None:
                session = self.contexts[name]
                keys = session.all_keys
                signed = encode_head(record, session.turns, redis.names_of(keys), self._head_key)
                heads.append(HeadToTell(name, session.turns, redis.leading_tokens(keys), signed))
        return heads

    def adopt(self, request_id: str, name: SessionName, data: bytes, now: float) -> None:
        """Take over a session of another server. data: its head (the signed record of it). When the headers of its
        extents have come, `take_adopted` returns the request. Raises BadHead."""
        head = decode_head(data, name, self._head_key)
        try:
            SessionContext.unpack(head.context, self._domain_of(name[0], name[1]), now)
        except msgspec.DecodeError as error:
            raise BadHead(f"with a context that is none: {error}") from error
        job = self._tiers.redis.read_headers(head.extents)
        self._adoptions[job] = request_id, name, head

    def on_headers(self, job: int, extents: Sequence[RedisExtent], reason: str | None, now: float) -> None:
        """Record which blocks of a session that is being taken over are in Redis. An extent that is not there is a
        miss."""
        request_id, name, head = self._adoptions.pop(job)
        if self.deletions.is_deleting(name):
            self._adopted.append((request_id, "busy"))
            return
        adopted = SessionContext.unpack(head.context, self._domain_of(name[0], name[1]), now)
        for extent in extents:
            if extent.session.names[:2] == name[:2]:
                self._tiers.redis.adopt(extent, name, adopted.all_keys)
        known = self.contexts.get(name)
        if known is None or known.turns <= head.turns:
            adopted.turns, adopted.pinned, adopted.ttl_s = head.turns, head.pinned, head.ttl_s
            adopted.owned = {} if known is None else known.owned
            if head.ttl_s is not None:
                self._with_own_ttl.add(name)
            if head.pinned:
                self._tiers.pinned.add(name)
            self.contexts.pop(name, None)
            self.contexts[name] = adopted
            self._end_if_condemned(name, adopted)
            self.deletions.expired.pop(name, None)
            self._take_over(name, adopted)
            self._count_size(adopted.num_tokens)
            self._tiers.writes.session_changed(name)
        else:  # it had a turn here since; what the other server has computed is of use all the same
            known.owned.update(dict.fromkeys(key for key in adopted.all_keys if self._is_owner(name, key)))
        self._adopted.append((request_id, "unavailable" if reason is not None and not extents else None))

    def _is_owner(self, name: SessionName, key: BlockKey) -> bool:
        row = self._table.get(key)
        return row is not None and name in row.owners

    def take_adopted(self) -> list[tuple[str, str | None]]:
        """Return (request, reason) for each take-over of a session that has ended, and forget it. reason: `busy` or
        `unavailable` if it has failed, otherwise None."""
        adopted, self._adopted = self._adopted, []
        return adopted

    # --- a session expires --------------------------------------------------------------------------------------------

    def sweep(self, now: float, most: float = _SWEEP_BATCH) -> int:
        """Delete from every tier the sessions that were not used for their time to live, with the blocks that only they
        own: at most `most` of them, the others in a later sweep. Besides, forget the sessions with the oldest use while
        there are more than `max_sessions`. Returns how many sessions are gone; a deletion that has to wait for a copy
        of its blocks is not counted."""
        before = len(self.contexts)
        forgotten: list[SessionName] = []
        over: list[SessionName] = []
        for name, session in self.contexts.items():
            if before - len(forgotten) > self._max_sessions:
                if not session.pinned and not self.deletions.is_deleting(name):
                    forgotten.append(name)
            elif self._may_expire(name, session, now):
                if len(over) >= most:
                    break
                over.append(name)
            elif session.ttl_s is None and not session.pinned and not self._is_over(session, now):
                break  # oldest use first: the rest has time left too, except sessions with a ttl_s
        for name in forgotten:
            self.deletions.forget(name)
        for name in over:
            self.deletions.begin(name, None)
        left = most - len(over)
        for name in list(self._with_own_ttl):
            if (own := self.contexts.get(name)) is None:
                self._with_own_ttl.discard(name)
            elif left > 0 and self._may_expire(name, own, now):
                self.deletions.begin(name, None)
                left -= 1
        return before - len(self.contexts)

    def _may_expire(self, name: SessionName, session: SessionContext, now: float) -> bool:
        """Return whether a session's time to live is over and it can be deleted. A running one waits for a later
        sweep."""
        return self._is_over(session, now) and not self.deletions.is_deleting(name) and not self.is_running(name)

    def _is_over(self, session: SessionContext, now: float) -> bool:
        ttl_s = self._session_ttl_s if session.ttl_s is None else session.ttl_s
        return not session.pinned and now - session.last_used_s >= ttl_s

    def codec_condemned(self) -> None:
        """Let the sessions expire whose KV a codec may have changed, or whose KV was computed on such KV."""
        for name, session in self.contexts.items():
            self._end_if_condemned(name, session)

    def _end_if_condemned(self, name: SessionName, session: SessionContext) -> None:
        if self._tiers.form.is_condemned and not is_exact(name[1]):
            session.pinned, session.ttl_s = False, 0.0
            self._tiers.pinned.discard(name)
            self._with_own_ttl.add(name)

    # --- the disk is taken --------------------------------------------------------------------------------------------

    def restore(self, extents: Iterable[ExtentInfo], records: Iterable[SessionRecord], now: float) -> None:
        """Restore the blocks and sessions that the disk has kept from an earlier process, when this one begins or, if
        the disk did not answer then, later. A session that goes on here keeps its context. One that was to be deleted
        meanwhile is deleted."""
        deleted, records = self.deletions.take_unseen(), list(records)
        known = set(self.contexts)
        recorded = {record.names for record in records}
        unwanted: list[int] = []
        for extent in extents:
            name = (extent.session.tenant, extent.session.salt, extent.session.session_id)
            if name[::2] in deleted and (name in known or name not in recorded):
                # Of a session that has begun again, or that no deletion would find.
                self._tiers.disk.adopt(extent, [])
                unwanted.append(extent.extent_id)
                continue
            rows = [
                BlockRow(
                    key=block.key,
                    parent=block.parent,
                    token_ids=(tokens := tokens_of(block.token_ids)),
                    size_bytes=len(tokens) * self._bytes_per_token,
                    session_id=name[2] if block.is_open else None,
                    kept_raw=True,  # not known whether it begins a context, or holds decoded rows
                    owners=(name,),
                )
                for block in extent.blocks
            ]
            self._tiers.disk.adopt(extent, rows)
        for record in sorted(records, key=lambda r: r.last_used_s):
            self._restore(record)
        for row in self._table:
            row.owners = tuple(owner for owner in row.owners if owner in self.contexts or self.is_running(owner))
            for owner in row.owners:
                if owner in self.contexts:
                    self.contexts[owner].owned[row.key] = None
        for name in sorted(self.contexts, key=lambda name: self.contexts[name].last_used_s):
            self.contexts.move_to_end(name)
        if unwanted:
            self._tiers.disk.delete(unwanted, None, None)
        for name in [name for name in self.contexts if name[::2] in deleted and name not in known]:
            self.deletions.begin(name, None)
        self.sweep(now, math.inf)

    def _restore(self, record: SessionRecord) -> None:
        name = (record.tenant, record.salt, record.session_id)
        if not record.context:
            return
        if (known := self.contexts.get(name)) is not None:
            self._take_over(name, known)
            self._tiers.writes.session_changed(name)
            return
        self._tiers.used(name, record.last_used_s - self._unix_offset_s)
        domain = self._domain_of(record.tenant, record.salt)
        session = SessionContext.unpack(record.context, domain, record.last_used_s - self._unix_offset_s)
        session.pinned, session.ttl_s = record.pinned, record.ttl_s
        if record.ttl_s is not None:
            self._with_own_ttl.add(name)
        self._take_over(name, session)
        self.contexts[name] = session
        self._count_size(session.num_tokens)
        self._end_if_condemned(name, session)
        if session.pinned:
            self._tiers.pinned.add(name)
