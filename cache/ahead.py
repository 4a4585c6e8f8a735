"""LookAhead: what the queue says about the next turns, as hints to the policies, fetches and writes."""

from collections.abc import Mapping, Sequence

from cache.context import RunningContext
from cache.hierarchy import Hierarchy
from cache.sessions import SessionStore
from cache.windows import eviction_window, prefetch_window


class LookAhead:
    """Single-threaded, part of the CacheManager."""

    def __init__(
        self, *, tiers: Hierarchy, sessions: SessionStore, running: Mapping[str, RunningContext], reuse: bool
    ) -> None:
        self._tiers, self._table, self._lower = tiers, tiers.table, tiers.lower
        self._sessions = sessions
        self._running = running
        self._reuse = reuse
        self._waiting: list[str] = []

    def plan(self, waiting: Sequence[str], starting: int, now: float) -> None:
        """Look ahead (AttentionStore §3.3): tell the policies what comes, fetch for it, write what is behind. The first
        `starting` of those who wait have a place in the batch: they load for themselves, layer by layer."""
        if waiting != self._waiting:
            self._waiting = list(waiting)
            names = [self._running[request_id].session for request_id in waiting]
            if self._sessions.mean_bytes:
                window = eviction_window(
                    self._lower.dram_slots * self._lower.slot_bytes, self._lower.disk_bytes, self._sessions.mean_bytes
                )
                for policy in self._tiers.policies:
                    policy.look_ahead(names[:window], now)
            self._fetch_ahead(waiting[starting:])
        if self._lower.is_dirty:
            running = {context.session for context in self._running.values() if context.pages}
            self._lower.plan_writes(self._sessions.contexts, running, self._sessions.record, now)
        self._lower.trim()

    def _fetch_ahead(self, waiting: Sequence[str]) -> None:
        if not (waiting and self._lower.disk_bytes and self._reuse and self._sessions.mean_bytes):
            return
        room = (self._lower.num_slots - self._lower.resident) * self._lower.slot_bytes
        for request_id in waiting[: prefetch_window(room, self._sessions.mean_bytes)]:
            context = self._running[request_id]
            if context.pages:
                continue  # admitted ahead of its turn: what it needs is on its way to HBM
            rows = self._table.matched(context.chain())
            self._lower.fetch((row for row in rows if row.page is None), context.session)
